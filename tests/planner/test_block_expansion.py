"""A skipped block gets the operations of its twin."""

import pytest

from lightning_unified.cost_model.trace.trace import Give, Work
from lightning_unified.planner.fake.storages import Storage
from lightning_unified.planner.repeats import UnlikeError
from lightning_unified.planner.repeats.expansion import expanded
from lightning_unified.planner.repeats.marks import Mark


def recording(*, third=16):
    """A recording of three blocks' forward passes, of which the last was skipped."""
    storages = [Storage(number, count) for number, count in enumerate((16, third, 16, 16))]
    raw = []
    for block in (0, 1, 2):
        own = storages[block + 1]
        skipped = block == 2
        raw.append(Mark(("forward", 0, block), skipped=skipped, result=own))
        raw += [] if skipped else [Work("aten.relu.default", "forward", f"net.{block}.act"), own]
    return [storages[0], *raw]


def expand(raw):
    reserve = lambda count: Storage(99, count)  # noqa: E731
    return expanded(raw, names=["net.0", "net.1", "net.2"], twins={2: (0, 1)}, reserve=reserve)


def test_a_skipped_block_gets_its_twins_operations_under_its_own_name():
    *_, work, storage = expand(recording())

    assert work == Work("aten.relu.default", "forward", "net.2.act")
    assert (storage.number, storage.bytes) == (3, 16)


def test_twins_that_allocate_other_bytes_are_refused():
    raw = recording()
    raw[3].bytes = 32

    with pytest.raises(UnlikeError, match="two blocks differ"):
        expand(raw)


def test_a_storage_that_ends_twice_is_refused():
    with pytest.raises(UnlikeError, match="does not live"):
        expand([*recording(), Give(0), Give(0)])
