"""The order of batches is a function of (seed, epoch).

The loader returns to any place in it, with and without workers.
"""

import random

import numpy as np
import pytest
import torch

from lightning_unified.data.loader import LoaderOptions, ResumableLoader, plan_epoch
from lightning_unified.data.packing import Rows, Sequence
from tests.support.lanes import first_cells, some


def row(number, length):
    ids = np.full(length, 10 + number, dtype=np.int32)
    zeros = np.zeros(length, dtype=np.int32)
    return Sequence(
        ids=ids, scored=np.ones(length, dtype=bool), codes=zeros, diagnosis=np.full(length, -100, dtype=np.int8)
    )


def rows(count=23):
    return Rows([row(number, 3 + number % 14) for number in range(count)], buckets=[8, 16])


def loader(**changes):
    place = {name: changes.pop(name) for name in ("rank", "world_size", "processed") if name in changes}
    return ResumableLoader(rows(), LoaderOptions(**({"batch_size": 4} | changes)), **place)


def contents(batches):
    return [tuple((batch["input_ids"].amax(dim=1) - 10).tolist()) for batch in batches]


def test_an_epoch_without_dropping_has_every_row_once():
    seen = [number for batch in contents(loader()) for number in batch]

    assert sorted(seen) == list(range(23))


def test_every_batch_but_the_last_has_the_effective_size():
    sizes = [len(batch) for batch in contents(loader())]

    assert sizes == [4, 4, 4, 4, 4, 3]
    assert [len(batch) for batch in contents(loader(drop_last=True))] == [4] * 5
    assert (len(loader()), len(loader(drop_last=True))) == (6, 5)


def test_the_rows_left_out_are_random_ones_and_not_the_longest():
    bucket_of = np.array([0] * 20 + [1] * 3)
    left_out = set()
    for epoch in range(60):
        plan = plan_epoch(bucket_of, batch_size=4, seed=0, epoch=epoch, shuffle=True, drop_last=True)
        left_out |= set(range(23)) - {number for batch in plan for number in batch}

    assert len(left_out) > 20


def test_rows_of_like_length_meet():
    bucket_of = np.tile([0, 1], 40)
    plan = plan_epoch(bucket_of, batch_size=8, seed=0, epoch=0, shuffle=True, drop_last=True)
    mixed = [batch for batch in plan if len({bucket_of[number] for number in batch}) > 1]

    assert len(mixed) <= 1


def test_the_order_depends_on_seed_and_epoch_only():
    first, again = loader(), loader()

    assert contents(first) == contents(again)
    assert contents(loader(seed=1)) != contents(loader())
    again.set_epoch(1)
    assert contents(again) != contents(loader())


def test_finished_epochs_follow_each_other_without_being_told():
    running, moved = loader(), loader()
    list(running)
    moved.set_epoch(1)

    assert contents(running) == contents(moved)


def test_an_epoch_broken_off_begins_anew():
    running = loader()
    first = contents([next(iter(running))])

    assert contents(running)[:1] == first


def test_nothing_is_drawn_from_the_global_random_states():
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    list(loader())
    list(loader(num_workers=1))

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


WORKERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    {"num_workers": 1, "persistent_workers": True, "start_method": "spawn"},
]


@first_cells(1, "workers", some(WORKERS, *WORKERS[:2]), ids=["none", "two", "persistent", "spawned"])
def test_a_new_loader_goes_on_where_the_old_one_was(workers):
    whole = [*contents(loader()), *contents(_at_epoch(1))]
    old = loader(**workers)
    iterator = iter(old)
    seen = contents([next(iterator) for _ in range(2)])
    new = loader(**workers)
    new.load_state_dict(old.state_dict())
    seen += contents(new) + contents(new)

    assert seen == whole


def _at_epoch(epoch):
    other = loader()
    other.set_epoch(epoch)
    return other


def test_length_stays_that_of_the_whole_epoch():
    new = loader()
    new.load_state_dict({**new.state_dict(), "position": 4})

    assert len(new) == 6
    assert len(list(new)) == 2


def test_persistent_workers_broken_off_and_restarted_give_no_stale_batch():
    running = loader(num_workers=2, persistent_workers=True)
    next(iter(running))
    running.set_epoch(5)

    assert contents(running) == contents(_at_epoch(5))


def test_a_batch_handed_out_but_not_processed_is_not_counted():
    done = 0
    running = loader(processed=lambda: done)
    iterator = iter(running)
    next(iterator)
    done = 1
    next(iterator)

    assert running.state_dict()["position"] == 1


def test_ranks_share_each_batch_and_the_last_is_filled_with_rows_without_targets():
    whole = contents(loader(batch_size=6))
    ranks = [list(loader(batch_size=6, rank=rank, world_size=2)) for rank in range(2)]

    assert [len(batch["labels"]) for batch in ranks[0]] == [3, 3, 3, 3]
    for together, first, second in zip(whole, *ranks, strict=True):
        shared = [number for number in (*contents([first])[0], *contents([second])[0]) if number >= 0]
        assert sorted(shared) == sorted(together)
    filler = ranks[1][-1]["labels"][-1]
    assert (filler == -100).all()


def test_a_place_in_another_order_is_refused_and_the_change_is_named():
    state = {**loader().state_dict(), "position": 2}
    loader().load_state_dict(state)

    with pytest.raises(ValueError, match=r"after batch 2 of epoch 0.*\(seed 0 -> 3\)"):
        loader(seed=3).load_state_dict(state)
