"""Ranks with shards train as one process trains, whole or split, through failures of one.

No process waits for the other without end.
"""

import inspect
import pickle
from functools import cache

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_unified import UnifiedDDPStrategy, UnifiedFSDPStrategy
from lightning_unified.errors import ConfigurationError
from tests.support.lanes import slow, some
from tests.support.ranks import sharded
from tests.support.ranks.processes import on_ranks

REPEATED = ("forward", "backward", "reduction", "hook", "clipping")
ALONE = ("gathering", "optimizer step", "half written", "validation")


@cache
def alone(name):
    return sharded.alone(name)


FAST = {
    sharded.recovered_shards: ("backward", "smaller"),
    sharded.recovered: ("backward", "smaller", "half written", "undisturbed"),
}


@cache
def shared(function, phases):
    return on_ranks(function, *phases)


def fits_of(function, phase, twin):
    """Return the fits of a phase and of its undisturbed twin; those of the fast lane share two processes."""
    return shared(function, FAST[function] if phase in FAST[function] else (phase, twin))


def assert_alike(fits, other):
    torch.testing.assert_close(fits["weights"], other["weights"], rtol=0, atol=1e-10)
    assert fits["metrics"] == pytest.approx(other["metrics"], abs=1e-10)
    assert fits["seen"] == pytest.approx(other["seen"], abs=1e-10)
    assert fits["steps"] == other["steps"]


@pytest.mark.parametrize(
    ("name", "size", "rows"),
    [
        ("clipped windows", 2, 3),
        slow("plain", 2, "auto"),
        slow("plain", 4, 1),
        slow("clipped windows", 4, "auto"),
        slow("wide", 2, 3),
    ],
)
def test_ranks_train_as_one_process_on_their_joined_batches(name, size, rows):
    for fits in on_ranks(sharded.run, size, name, {"micro_batch_size": rows}, size=size):
        assert_alike(fits, alone(name))


@pytest.mark.parametrize(
    ("name", "size", "rows"),
    [
        ("clipped windows", 2, 2),
        slow("plain", 2, "auto"),
        slow("plain", 4, 1),
        slow("clipped windows", 4, "auto"),
        slow("wide", 2, 1),
    ],
)
def test_ranks_that_hold_shards_train_as_one_process(name, size, rows):
    arguments = {"hold": "shards", "micro_batch_size": rows}
    for fits in on_ranks(sharded.run, size, name, arguments, size=size):
        assert_alike(fits, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["parameters", "shards"])
def test_recomputed_blocks_train_as_kept_ones(hold):
    for fits in on_ranks(sharded.run, 2, "plain", {"hold": hold, "recompute": True}):
        assert_alike(fits, alone("plain"))


@pytest.mark.parametrize("phase", some((*REPEATED, "collective", "gathering"), "backward"))
def test_ranks_that_hold_shards_leave_and_repeat_a_batch_together(phase):
    phase = phase if phase != "reduction" else "collective"
    for fits in fits_of(sharded.recovered_shards, phase, "smaller"):
        assert fits[phase]["recoveries"] == 1
        assert fits[phase]["largest"] == fits["smaller"]["largest"] == 2
        assert torch.equal(fits[phase]["weights"], fits["smaller"]["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["optimizer step", "half written", "validation"])
def test_ranks_that_hold_shards_repeat_updates_alone_and_evaluations_together(phase):
    for fits in fits_of(sharded.recovered_shards, phase, "undisturbed"):
        assert torch.equal(fits[phase]["weights"], fits["undisturbed"]["weights"])
        assert fits[phase]["metrics"] == pytest.approx(fits["undisturbed"]["metrics"])


def test_ranks_that_come_to_different_collectives_end_and_say_why():
    for ended in on_ranks(sharded.different_paths):
        assert ended.kind == "RankError"
        assert "different collectives" in ended.text


@pytest.mark.parametrize("hold", some(["parameters", "shards"], "shards"))
def test_a_rank_that_is_gone_is_named_by_the_others(hold):
    first, second = on_ranks(sharded.dying, hold)
    assert (first.kind, second.kind) == ("RankError", "Gone")
    assert "rank 1" in first.text


def test_shards_are_held_where_the_whole_does_not_fit_the_budget():
    held = on_ranks(sharded.chosen)

    assert held == [("parameters", "shards")] * 2


@pytest.mark.slow
def test_ranks_may_split_into_different_sizes():
    first, second = on_ranks(sharded.different_sizes)

    assert (first["largest"], second["largest"]) == (1, 2)
    for fits in (first, second):
        assert_alike(fits, alone("clipped windows"))


@pytest.mark.parametrize("phase", some(REPEATED, "backward"))
def test_all_repeat_a_batch_in_the_same_micro_batches_if_one_rank_lacks_memory(phase):
    for fits in fits_of(sharded.recovered, phase, "smaller"):
        assert fits[phase]["recoveries"] == 1
        assert fits[phase]["largest"] == fits["smaller"]["largest"] == 2
        assert torch.equal(fits[phase]["weights"], fits["smaller"]["weights"])
        assert fits[phase]["metrics"] == fits["smaller"]["metrics"]


@pytest.mark.parametrize("phase", some(ALONE, "half written"))
def test_a_rank_whose_update_or_gathering_fails_does_it_again(phase):
    for fits in fits_of(sharded.recovered, phase, "undisturbed"):
        assert torch.equal(fits[phase]["weights"], fits["undisturbed"]["weights"])
        assert fits[phase]["metrics"] == pytest.approx(fits["undisturbed"]["metrics"])


@pytest.mark.slow
def test_without_copies_a_failed_update_ends_all_ranks():
    first, second = on_ranks(sharded.without_copies)

    assert (first.kind, second.kind) == ("RankError", "HalfUpdatedError")
    assert "rank 1 ran out of memory while the optimizer wrote its rows" in first.text


def test_what_cannot_be_trained_sharded_is_refused_by_name():
    for refused in on_ranks(sharded.refusals):
        assert "needs automatic optimization" in refused["manual"]
        assert 'cannot train with precision="16-mixed"' in refused["16-mixed"]
        assert "cannot run LBFGS" in refused["LBFGS"]
        assert "leaves embed.weight whole" in refused["partly sharded"]


@pytest.mark.slow
def test_a_module_that_shards_itself_is_left_as_it_is():
    for fits in on_ranks(sharded.sharded_by_module):
        assert_alike(fits, alone("plain"))


def test_it_takes_the_arguments_of_unified_ddp_with_one_other_default():
    own, other = (inspect.signature(kind).parameters for kind in (UnifiedFSDPStrategy, UnifiedDDPStrategy))
    of_ddp = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph"}

    assert set(other) - of_ddp == set(own) - {"hold", "save_distributed_checkpoint"}
    differ = {name for name in set(own) & set(other) if own[name].default != other[name].default}
    assert differ == {"optimizer_rollback"}


@pytest.mark.parametrize("method", ["popen", "spawn", "fork"])
def test_it_is_registered_with_each_start_method(method):
    name = "unified_fsdp" if method == "popen" else f"unified_fsdp_{method}"

    assert StrategyRegistry.get(name)._start_method == method


def test_it_can_be_sent_to_a_process_that_is_spawned():
    strategy = UnifiedFSDPStrategy(micro_batch_size=3, start_method="spawn")

    assert pickle.loads(pickle.dumps(strategy)).policy.sizes.max_micro_batch_size == 3


def test_a_hold_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="hold='all': give"):
        UnifiedFSDPStrategy(hold="all")
