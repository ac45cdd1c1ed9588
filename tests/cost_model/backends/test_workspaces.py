from dataclasses import replace

import pytest

from lightning_unified.cost_model.backends import with_workspaces
from lightning_unified.cost_model.backends.workspaces import cublas_bytes
from lightning_unified.cost_model.trace.trace import Take, Trace, Work

MIB = 2**20


def trace(*works, backend="cuda"):
    return Trace(events=(Take(7, 100, "batch"), *works), rows=2, backend=backend)


FORWARD = Work("aten.mm.default", "forward")
BACKWARD = Work("aten.bmm.default", "backward")
FUSED = Work("aten.addmm.default", "forward")


def sizes(given, **options):
    return [
        e.bytes
        for e in with_workspaces(given, **{"environment": {}, "generation": 9, **options}).events
        if isinstance(e, Take) and e.category == "workspaces"
    ]


def test_each_thread_that_multiplies_takes_32_mib_on_hopper():
    assert sizes(trace(FORWARD)) == [32 * MIB]
    assert sizes(trace(FORWARD, BACKWARD)) == [32 * MIB] * 2


def test_a_product_with_a_fused_bias_takes_one_mib_more():
    assert sizes(trace(FUSED, BACKWARD)) == [32 * MIB, MIB, 32 * MIB]
    assert sizes(trace(FUSED, BACKWARD, Work("aten.addmm.default", "backward"))) == [32 * MIB, MIB] * 2


def test_products_in_cuda_graphs_take_none_of_their_own():
    inside = [Work("aten.mm.default", phase, "net.0") for phase in ("forward", "backward")]
    replayed = replace(trace(*inside, FORWARD), replayed=("net",))

    assert sizes(replayed) == [32 * MIB]
    assert sizes(replace(trace(*inside), replayed=("net",))) == []


def test_a_step_without_products_takes_none():
    given = trace(Work("aten.convolution.default", "forward"), Work("aten.mmm.default", "forward"))
    assert with_workspaces(given, environment={}) is given


@pytest.mark.parametrize("backend", ["cpu", "mps"])
def test_other_backends_take_none(backend):
    given = trace(FORWARD, backend=backend)
    assert with_workspaces(given, environment={}) is given


@pytest.mark.parametrize(
    ("config", "expected"),
    [(":4096:2:16:8", 8 * MIB + 128 * 1024), (":16:8", 128 * 1024), (":0:0", 0), ("nonsense", 32 * MIB)],
)
def test_the_variable_sets_the_size(config, expected):
    assert cublas_bytes("cuda", environment={"CUBLAS_WORKSPACE_CONFIG": config}, generation=9) == expected


def test_a_size_of_nothing_leaves_no_event():
    assert sizes(trace(FORWARD, BACKWARD), environment={"CUBLAS_WORKSPACE_CONFIG": ":0:0"}) == []


def test_other_generations_take_eight_mib_and_an_eighth():
    assert sizes(trace(FORWARD), generation=8) == [8 * MIB + 128 * 1024]


def test_rocm_takes_its_own_sizes():
    assert sizes(trace(FUSED, backend="rocm")) == [32 * MIB, 76 * MIB]


def test_the_workspaces_come_first_and_under_numbers_that_are_free():
    events = with_workspaces(trace(FORWARD, BACKWARD), environment={}, generation=9).events
    assert [event.storage for event in events[:3]] == [8, 9, 7]


def test_a_workspace_names_the_operation_that_first_needs_it():
    events = with_workspaces(trace(Work("aten.relu.default", "forward"), FUSED, BACKWARD), environment={}).events
    assert [event.since for event in events if isinstance(event, Take) and event.category == "workspaces"] == [1, 1, 2]
