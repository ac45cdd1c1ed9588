"""`plan` for several devices that need not be here."""

import json
from pathlib import Path

from lightning_unified.cli.plan.command import main
from tests.cli.conftest import CONF
from tests.support.lanes import first_cells

ROOT = Path(__file__).parents[3]
GEAR = ("model=gearhead", "hardware=cuda", "memory.budget=16GiB")


@first_cells(
    4,
    ("arguments", "words"),
    [
        (["trainer.devices=0"], "trainer.devices=0"),
        (["trainer.devices=abc"], "trainer.devices=abc"),
        (["trainer.devices=8"], "trainer.devices=8 needs a strategy"),
        (["trainer.devices=8", "trainer.strategy=foo"], "trainer.strategy=foo"),
        (["trainer.devices=auto", "trainer.strategy=unified_ddp"], "trainer.devices=auto"),
        (["trainer.num_nodes=0", "trainer.devices=8", "trainer.strategy=unified_ddp"], "trainer.num_nodes=0"),
        (["trainer.devices=8", "trainer.strategy=unified_ddp", "--link", "wire"], "--link='wire'"),
        (["--link", "nvlink4"], "--link nvlink4"),
        (["trainer.devices=7", "trainer.strategy=unified_ddp"], "give a multiple of 7 as data.batch_size"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_its_key(command, arguments, words):
    done = command(*GEAR, *arguments)

    assert done.code == 2 and words in done.err


@first_cells(
    2,
    ("arguments", "asked"),
    [
        (["trainer.devices=8", "trainer.strategy=unified_fsdp"], {"devices": 8, "strategy": "unified_fsdp"}),
        (
            ["trainer.devices=8", "trainer.strategy=unified_fsdp_shards"],
            {"devices": 8, "strategy": "unified_fsdp", "hold": "shards"},
        ),
        (["trainer.devices=[0,1]", "trainer.strategy=unified_ddp"], {"devices": 2, "strategy": "unified_ddp"}),
        (
            ["trainer.devices=4", "trainer.num_nodes=2", "trainer.strategy=unified_ddp_spawn"],
            {"devices": 8, "strategy": "unified_ddp"},
        ),
        (
            ["trainer.devices=2", "trainer.strategy=unified_ddp", "--link", "50e9"],
            {"devices": 2, "strategy": "unified_ddp", "link": "50e9"},
        ),
    ],
)
def test_the_keys_of_the_trainer_name_the_devices(command, calls, arguments, asked):
    assert command(*GEAR, *arguments).code == 0
    assert {name: vars(calls.call).get(name) for name in asked} == asked


@first_cells(1, "keys", [(), ("trainer.devices=2", "trainer.strategy=unified_fsdp")])
def test_copies_around_the_optimizer_step_count_as_the_run_makes_them(command, calls, keys):
    asked = []
    for more in ((), ("memory.optimizer_rollback=true",), ("memory.optimizer_rollback=true", "memory.recover=false")):
        assert command(*GEAR, *keys, *more).code == 0
        asked.append(calls.call.optimizer_rollback)

    assert asked == [False, True, False]


def test_devices_share_the_batch_of_a_models_own_data(command, calls):
    keys = ("data.batch_size=32", "data.val_batch_size=16", "trainer.devices=8", "trainer.strategy=unified_ddp")

    assert command(*GEAR, *keys).code == 0
    assert {len(tensor) for tensor in calls.call.batch.values()} == {4}


def test_a_plan_for_one_device_asks_for_no_group(command, calls):
    assert command(*GEAR).code == 0
    assert "devices" not in vars(calls.call)


def test_apple_gpus_are_refused_as_several_devices(command):
    done = command("model=gearhead", "simulate=m2-16gb", "trainer.devices=2", "trainer.strategy=unified_ddp")

    assert done.code == 2 and "trainer.devices=2" in done.err


def test_a_laptop_plans_eight_gpus(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ("--module", f"{ROOT}/tests/support/modules/ranked_blocks.py:Net", "--batch-shape", "16x64")
    keys = ("simulate=h200", "memory.budget=16GiB", "trainer.devices=8", "trainer.strategy=unified_fsdp")

    assert main([*keys, *module, "--json"], config_path=CONF) == 0
    page = json.loads(capfd.readouterr().out)
    layouts = page["plan"]["layouts"]
    assert (page["devices"], page["strategy"], page["hold"]) == (8, "unified_fsdp", "parameters")
    assert {one["strategy"] for one in layouts} == {"unified_ddp", "unified_fsdp"}
    held = {(one["strategy"], one["hold"]): one["peak_bytes"] for one in layouts if one["recompute"] == "none"}
    assert held["unified_fsdp", "shards"] < held["unified_ddp", ""]
