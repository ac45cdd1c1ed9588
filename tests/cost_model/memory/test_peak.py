"""The peak of live bytes, with its categories and its place in the step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.cost_model.memory.peak import instants, peak
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work


def trace_of(*events):
    return Trace(events=events, rows=2, backend="cuda")


@st.composite
def traces(draw):
    """Random storages, given back in a random order."""
    events, live = [], []
    for number, size in enumerate(draw(st.lists(st.integers(0, 10**8), max_size=30))):
        events.append(Take(number, size, draw(st.sampled_from(["weights", "logits"]))))
        live.append(number)
        ends = min(len(live), draw(st.integers(0, 2)))
        events += [Give(live.pop(draw(st.integers(0, len(live) - 1)))) for _ in range(ends)]
    return trace_of(*events)


@settings(deadline=None)
@given(traces(), st.sampled_from([1, 512]))
def test_no_running_sum_is_above_the_peak_and_one_equals_it(trace, rounding):
    live, sums = {}, [0]
    for event in trace.events:
        if isinstance(event, Take):
            live[event.storage] = -(-event.bytes // rounding) * rounding
        else:
            del live[event.storage]
        sums.append(sum(live.values()))
    found = peak(trace, rounding=rounding)
    assert found.bytes == max(sums)
    assert found.bytes == 0 or sums[found.index + 1] == found.bytes


@settings(deadline=None)
@given(traces())
def test_categories_add_up_to_the_peak(trace):
    assert sum(peak(trace).categories.values()) == peak(trace).bytes


def test_the_instant_is_named_by_phase_module_and_operation():
    trace = trace_of(
        Work("aten.mm.default", "forward", "layers.3.mlp"),
        Take(0, 1000, "activations"),
        Work("aten.mm.default", "backward", "layers.3.mlp"),
        Take(1, 1000, "temporaries"),
        Give(1),
        Work("aten.add.Tensor", "optimizer step"),
    )
    assert peak(trace).instant == "backward of layers.3.mlp (aten.mm)"


def test_an_instant_outside_modules_is_named_by_its_phase():
    trace = trace_of(
        Work("", "setup"),
        Take(0, 8, "weights"),
        Give(0),
        Work("aten.add_.Tensor", "optimizer step"),
        Take(1, 600, "temporaries"),
    )
    assert peak(trace).instant == "optimizer step (aten.add_.Tensor)"


def test_what_lives_before_the_first_operation_is_before_the_step():
    assert peak(trace_of(Take(0, 8, "weights"))).instant == "before the step"


def test_places_are_in_the_order_of_the_step_with_their_own_peaks():
    trace = trace_of(
        Take(0, 512, "weights"),
        Work("a", "forward", "net"),
        Take(1, 512, "activations"),
        Work("b", "backward", "net"),
        Take(2, 1024, "temporaries"),
        Give(2),
    )
    assert instants(trace) == (("before the step", 512), ("forward of net", 1024), ("backward of net", 2048))


def test_a_long_table_of_places_joins_the_innermost_modules(made):
    trace = made(rows=2, blocks=30)
    table = instants(trace, most=10)
    assert [place for place, _ in table] == [
        "before the step",
        "batch",
        "forward of blocks",
        "forward of head",
        "backward of blocks",
        "optimizer step",
    ]
    assert max(count for _, count in table) == peak(trace).bytes
