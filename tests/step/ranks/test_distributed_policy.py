"""Ranks merge their findings about sizes.

No rank runs a size that another rank knows to be too large.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.step.ranks.policy import most_careful
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.split import BatchShape

SHAPES = st.builds(BatchShape, st.integers(1, 40), st.sampled_from([10, 20, 40]))
EVENTS = st.lists(st.tuples(st.sampled_from(["failed", "worked", "press"]), SHAPES), max_size=12)


def state(events, start="auto"):
    sizes = MicroBatchSize(start)
    for event, shape in events:
        if event == "failed":
            sizes.failed(shape, room_bytes=100)
        elif event == "worked":
            sizes.worked(shape)
        else:
            sizes.press(shape)
    return sizes.state_dict()


def going_on(*states):
    sizes = MicroBatchSize("auto")
    sizes.load_state_dict(most_careful(states))
    return sizes


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=3), SHAPES)
def test_no_size_is_run_that_failed_on_any_rank(ranks, shape):
    states = [state(events) for events in ranks]
    at_once = going_on(*states).micro_batch_size(shape)

    for failure in (failure for each in states for failure in each["failures"]):
        if failure["elements"] <= shape.elements:
            assert at_once < max(failure["rows"], 2)
    for limit in (each["limit"] for each in states if each["limit"] is not None):
        assert at_once <= limit


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_ranks_that_have_joined_what_they_found_agree_and_stay_as_they_are(ranks):
    states = [state(events) for events in ranks]
    joined = most_careful(states)

    assert most_careful(reversed(states)) == joined
    assert most_careful([joined, joined]) == joined


def test_a_size_is_given_back_when_every_rank_has_forgotten_its_failure():
    shape = BatchShape(8, 10)
    failed = state([("failed", shape)])
    forgiven = {**failed, "failures": []}

    assert going_on(failed, forgiven).micro_batch_size(shape) == 4
    assert going_on(forgiven, forgiven).micro_batch_size(shape) == 8


def test_of_two_failures_at_the_same_size_the_one_with_more_memory_counts():
    failures = [{"elements": 10, "rows": 8, "room_bytes": room} for room in (100, 300)]
    one, other = ({**state([]), "failures": [failure]} for failure in failures)

    assert most_careful([one, other])["failures"] == failures[1:]
    assert most_careful([one, {**one, "failures": [{**failures[0], "room_bytes": None}]}])["failures"] == [
        {**failures[0], "room_bytes": None}
    ]


def test_a_size_proven_on_one_rank_is_tried_on_others_unless_it_failed_there():
    long, short = BatchShape(8, 20), BatchShape(6, 20)
    worked, failed = state([("worked", short)]), state([("failed", long)])

    assert going_on(worked, failed).micro_batch_size(BatchShape(6, 20)) == 6
    assert going_on(worked, state([("failed", BatchShape(4, 10))])).micro_batch_size(BatchShape(6, 20)) == 2


def test_a_proven_size_is_kept_when_a_larger_one_fails_on_another_rank():
    shape = BatchShape(64, 10)
    roomy, short = MicroBatchSize("auto"), MicroBatchSize("auto")
    roomy.plan(shape, micro_batch_size=22, refused=32, room_bytes=100)
    short.plan(shape, micro_batch_size=10, refused=11, room_bytes=50)

    assert going_on(roomy.state_dict(), short.state_dict()).micro_batch_size(shape) == 10
