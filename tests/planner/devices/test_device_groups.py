"""`predict` and `plan` with several devices: arguments, layouts and their words."""

import pytest
import torch

import lightning_unified
from lightning_unified.cost_model.plan import Layout
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.errors import ConfigurationError
from lightning_unified.planner.devices import DeviceGroup
from lightning_unified.planner.devices.layouts import best_layout, why_layout
from tests.support.modules.ranked_blocks import ROWS, WIDTH, Net

GIB = 2**30
BATCH = torch.zeros(ROWS, WIDTH)


def predict(**options):
    return lightning_unified.predict(Net(), BATCH, device="cuda", rates=tabled_rates("h200"), **options)


def layout(strategy, *, hold="", seconds=1.0, fits=True, reserved=GIB):
    return Layout(
        strategy=strategy,
        hold=hold,
        recompute="none",
        micro_batch_size=1,
        num_micro_batches=1,
        peak_bytes=reserved,
        reserved_bytes=reserved,
        seconds=seconds,
        link_seconds=0.1,
        fits=fits,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0, "strategy": "ddp"}, "devices=0"),
        ({"devices": True, "strategy": "ddp"}, "devices=True"),
        ({"devices": "8", "strategy": "ddp"}, "devices='8'"),
        ({"devices": 8}, "devices=8 needs a strategy"),
        ({"devices": 8, "strategy": "zero"}, "strategy='zero'"),
        ({"devices": 8, "strategy": "fsdp", "link": "wire"}, "link='wire'"),
        ({"devices": 8, "strategy": "unified_fsdp", "hold": "all"}, "hold='all'"),
    ],
)
def test_an_argument_that_is_none_is_refused_by_its_name(options, words):
    with pytest.raises(ConfigurationError, match=words):
        predict(**options)


def test_apple_gpus_are_one_device():
    with pytest.raises(ConfigurationError, match=r"devices=2.*mps"):
        lightning_unified.predict(Net(), BATCH, device="mps", devices=2, strategy="ddp")


def test_one_device_is_predicted_as_without_devices():
    assert predict(devices=1, strategy="fsdp").peak_bytes == predict().peak_bytes


def test_copies_take_scratch_memory_and_the_time_of_one_reduction():
    alone, copy = predict(), predict(devices=4, strategy="ddp", link=1e9)
    gradients = sum(one.numel() * 4 for one in Net().parameters())

    assert copy.peak_bytes - alone.peak_bytes == 2**20
    assert copy.sent_bytes == 2 * gradients * 3 // 4
    assert copy.link_seconds == pytest.approx(copy.sent_bytes / 1e9 + 2e-5)
    assert copy.seconds == pytest.approx(alone.seconds + copy.link_seconds, rel=0.01)


def test_what_ranks_hold_during_a_step_decides_memory_and_traffic():
    whole = predict(devices=8, strategy="unified_fsdp", hold="parameters")
    shards = predict(devices=8, strategy="unified_fsdp", hold="shards")

    assert shards.peak_bytes < whole.peak_bytes
    assert min(shards.sent_bytes, whole.sent_bytes) > 0
    assert whole.categories["gathered weights"] > shards.categories.get("gathered weights", 0)


@pytest.mark.parametrize(("budget", "hold"), [(None, "parameters"), (GIB, "parameters"), (2**10, "shards")])
def test_ranks_hold_whole_parameters_if_the_budget_allows_it(budget, hold):
    group = DeviceGroup.of(8, strategy="unified_fsdp", link=None, backend="cuda")

    assert group.holding("auto", Net(), budget_bytes=budget).hold == hold


@pytest.mark.slow
def test_a_plan_compares_copies_and_shards_with_and_without_checkpointing():
    plan = lightning_unified.plan(
        Net(), BATCH, budget="1GiB", device="cuda", devices=8, strategy="fsdp", rates=tabled_rates("h200")
    )

    assert [(one.strategy, one.hold, one.recompute) for one in plan.layouts] == [
        (strategy, hold, recompute)
        for strategy, hold in (("unified_ddp", ""), ("unified_fsdp", "parameters"), ("unified_fsdp", "shards"))
        for recompute in ("none", "all blocks")
    ]
    assert all(one.fits and one.link_seconds for one in plan.layouts)
    assert (plan.devices, plan.prediction.devices, plan.strategy) == (8, 8, "fsdp")
    assert "360 GB/s" in plan.reasons["link"] and "NVIDIA" in plan.reasons["link"]
    assert "8 devices: copies or shards" in str(plan)


@pytest.mark.parametrize(
    ("layouts", "best", "words"),
    [
        ([layout("unified_ddp", seconds=1), layout("unified_fsdp", hold="shards", seconds=2)], 0, "predicted faster"),
        ([layout("unified_ddp", fits=False), layout("unified_fsdp", hold="shards")], 1, "the fastest that fits is"),
        ([layout("unified_ddp", reserved=2), layout("unified_fsdp", hold="shards", reserved=1)], 1, "the fastest"),
        ([layout("unified_ddp", fits=False)], None, "nothing fits"),
    ],
)
def test_the_fastest_layout_that_fits_is_the_best(layouts, best, words):
    assert best_layout(layouts) is (None if best is None else layouts[best])
    assert words in why_layout(layouts, strategy="unified_fsdp", hold="shards")
