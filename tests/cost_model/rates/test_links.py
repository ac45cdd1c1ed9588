"""Links between devices: published speeds, bytes sent, and seconds of a step."""

from dataclasses import replace

import pytest

from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.cost import communication, split_seconds, step_seconds
from lightning_unified.cost_model.rates.links import (
    LINKS,
    Link,
    gathered_bytes,
    link_of,
    reduced_bytes,
    tabled_link,
)
from lightning_unified.cost_model.trace.trace import Collective, Trace, Work
from lightning_unified.errors import ConfigurationError

GB = 10**9
LINK = Link(name="made up", bandwidth=1e9, latency=0.0)
RATES = Rates(name="made up", flops={"float32": 1e9}, bandwidth=1e12, launch=0.0, kernel=0.0, part=0.0, link=LINK)
SECOND = 10**9  # operations, or bytes sent, of one second


def trace(*events, backend="cuda", num_micro_batches=1):
    return Trace(events=events, rows=1, num_micro_batches=num_micro_batches, backend=backend)


def work(phase, seconds):
    return Work("aten.mm", phase, flops=int(seconds * SECOND), moved=1, dtype="float32")


def sends(phase, seconds, *, overlaps=True):
    return Collective("all-gather", phase, sent=int(seconds * SECOND), overlaps=overlaps)


@pytest.mark.parametrize(("ranks", "gathered", "reduced"), [(1, 0, 0), (2, 400, 800), (4, 600, 1200), (8, 700, 1400)])
def test_ranks_send_the_bytes_of_the_ring_algorithm(ranks, gathered, reduced):
    assert (gathered_bytes(800, ranks=ranks), reduced_bytes(800, ranks=ranks)) == (gathered, reduced)


@pytest.mark.parametrize(
    ("device", "backend", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "nvlink4"),
        ("NVIDIA H100 PCIe", "cuda", "pcie5"),
        ("NVIDIA A100-SXM4-80GB", "cuda", "nvlink3"),
        ("NVIDIA A100 80GB PCIe", "cuda", "pcie4"),
        ("AMD Instinct MI300X", "rocm", "infinity-fabric"),
        ("Tesla T4", "cuda", "pcie3"),
        ("NVIDIA GeForce RTX 4090", "cuda", "pcie4"),
        ("", "cuda", "pcie4"),
        ("", "cpu", "host"),
    ],
)
def test_a_device_has_its_published_link(device, backend, name):
    assert tabled_link(backend, name=device) is LINKS[name]


@pytest.mark.parametrize(("name", "gigabytes"), [("nvlink5", 900), ("nvlink4", 450), ("nvlink3", 300), ("pcie5", 63)])
def test_a_link_reaches_most_of_its_published_bandwidth(name, gigabytes):
    assert LINKS[name].bandwidth == pytest.approx(0.8 * gigabytes * GB)


@pytest.mark.parametrize("given", ["nvlink9", "", 0, -1.0, True, "nan", float("inf"), None])
def test_a_link_that_is_none_is_refused_by_its_argument(given):
    with pytest.raises(ConfigurationError, match=r"--link=.*nvlink4.*bytes"):
        link_of(given, name="--link")


def test_a_link_may_be_given_in_bytes_a_second():
    assert link_of("50e9").bandwidth == link_of(50 * GB).bandwidth == 50 * GB
    assert link_of(50 * GB).seconds(100 * GB) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("events", "backend", "seconds"),
    [
        ([work("forward", 3), sends("forward", 2)], "cuda", 3),  # the link works while the device computes
        ([work("forward", 2), sends("forward", 3)], "cuda", 3),
        ([work("forward", 3), sends("forward", 2, overlaps=False)], "cuda", 5),
        ([work("forward", 1), sends("backward", 2), work("backward", 1)], "cuda", 3),  # each phase by itself
        ([work("forward", 3), sends("forward", 2)], "cpu", 5),  # one processor for all
    ],
)
def test_the_slowest_of_host_device_and_link_decides_a_phase(events, backend, seconds):
    assert step_seconds(trace(*events, backend=backend), RATES) == pytest.approx(seconds)


def test_a_machine_without_a_link_spends_no_time_on_collectives():
    alone = replace(RATES, link=None)

    assert step_seconds(trace(work("forward", 1), sends("forward", 5)), alone) == pytest.approx(1)
    assert communication(trace(sends("forward", 5)), None, num_micro_batches=1) == (5 * SECOND, None)


def test_each_micro_batch_gathers_again_and_the_update_reduces_once():
    step = trace(
        sends("forward", 1),
        sends("forward", 1),
        sends("optimizer step", 4, overlaps=False),
        backend="cuda",
        num_micro_batches=2,
    )

    assert communication(step, LINK, num_micro_batches=2) == (6 * SECOND, pytest.approx(6))
    assert communication(step, LINK, num_micro_batches=8) == (12 * SECOND, pytest.approx(12))
    assert split_seconds(lambda *_: step, (1,) * 8, RATES) == pytest.approx(12)


def test_rates_are_kept_without_their_link():
    assert Rates(**RATES.to_dict()) == replace(RATES, link=None)
