"""Recomputation is turned on where one row does not fit without it."""

import lightning as L
import pytest
from torch import nn

from lightning_unified.errors import OutOfMemoryError, SplitError
from lightning_unified.nn.recomputing import RecomputePolicy
from tests.support.modules.recomputed import Deep, Pairs, Switch, trained
from tests.trainer.strategies.memory_options.test_recompute import assert_equal


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Replace the collection of a whole session's garbage after each error: it is slow."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def test_when_one_row_does_not_fit_recomputation_is_turned_on_and_the_step_repeated():
    _, plain, _ = trained(Deep, None, False, recompute=True, rows=1)
    module, again, trainer = trained(Deep, 0.5, False, recompute="auto", rows=1)

    assert_equal(plain, again)
    assert trainer.strategy.plan.recompute is True
    assert trainer.strategy.plan.reasons["recompute"] == (
        "because memory ran out: 3 blocks of layers (Block), detected"
    )
    assert "with activations recomputed (because memory ran out" in trainer.strategy.events[-1]
    assert not module.recomputes


def test_a_batch_is_first_split_as_small_as_possible_and_sizes_are_then_found_anew():
    _, plain, _ = trained(Deep, None, False, recompute=True, strategy={"micro_batch_size": 1})
    _, again, trainer = trained(Deep, 0.5, False, recompute="auto")

    repeats = [event.split(";")[1] for event in trainer.strategy.events if "repeated" in event]
    assert [text.split(" (")[0] for text in repeats[:4]] == [
        " repeated with micro-batches of 4 rows",
        " repeated with micro-batches of 2 rows",
        " repeated with micro-batches of 1 row",
        " repeated with activations recomputed",
    ]
    assert trainer.strategy.micro_batch_size == 1
    assert_equal(plain, again)


def test_when_that_is_not_enough_the_run_gives_up_and_does_not_advise_it():
    with pytest.raises(OutOfMemoryError, match="even with the smallest micro-batch") as caught:
        trained(Deep, 0.1, False, recompute="auto", rows=1)

    assert "memory.recompute" not in str(caught.value)
    assert "hardware.precision=bf16-mixed" in str(caught.value)


def test_without_blocks_the_run_gives_up_as_before():
    class Flat(Deep):
        def __init__(self):
            super().__init__(0.5, norm=False)
            self.layers = nn.ModuleList([self.layers[0]])

    with pytest.raises(OutOfMemoryError, match=r"memory\.recompute=true"):
        trained(Flat, recompute="auto", rows=1)


def test_asked_for_as_false_it_is_never_turned_on():
    with pytest.raises(OutOfMemoryError, match="even with the smallest micro-batch"):
        trained(Deep, 0.5, False, recompute=False, rows=1)


def test_the_modules_own_switch_is_turned_on_for_want_of_memory_and_off_at_the_end():
    module, _, trainer = trained(Switch, 0.5, False, recompute="auto", rows=1)

    assert trainer.strategy.plan.reasons["recompute"] == "because memory ran out, by Switch.recompute"
    assert module.recompute is False


def test_a_batch_norm_that_forbids_cutting_is_recomputed_instead():
    _, plain, _ = trained(recompute=True)
    _, again, trainer = trained(Deep, 4, recompute="auto")

    assert_equal(plain, again)
    assert trainer.strategy.recoveries == 1
    assert trainer.strategy.micro_batch_size == 8


def test_a_loss_over_pairs_that_gradients_give_away_is_recomputed_instead():
    _, plain, _ = trained(Pairs, recompute=True)
    _, again, trainer = trained(Pairs, 4, recompute="auto")

    assert_equal(plain, again)
    assert trainer.strategy.micro_batch_size == 8


def test_if_it_still_does_not_fit_the_refusal_to_split_it_is_raised_again():
    with pytest.raises(SplitError, match="BatchNorm in train mode"):
        trained(Deep, 2, recompute="auto")


def test_another_run_beside_it_begins_with_what_was_found(tmp_path):
    def run(name):
        strategy = {"budget": "60%", "remember": str(tmp_path / name / "sizes.json")}
        return trained(Deep, 0.5, False, recompute="auto", rows=2, strategy=strategy)

    assert run("first")[2].strategy.recoveries > 0
    _, _, trainer = run("second")

    assert trainer.strategy.recoveries == 0
    assert "in an earlier run" in trainer.strategy.plan.reasons["recompute"]


class Plans(L.Callback):
    """Recomputes some of the blocks, as a plan would before the first step."""

    def __init__(self, policy):
        self.policy = policy

    def on_train_start(self, trainer, module):
        trainer.strategy.policy.recomputation.set(self.policy, why="as planned")


def test_a_plan_recomputes_the_first_blocks_and_weights_are_equal_bit_for_bit():
    _, plain, _ = trained(recompute=False)
    module, again, trainer = trained(recompute="auto", callbacks=[Plans(RecomputePolicy(blocks=2))])

    assert_equal(plain, again)
    assert [layer.runs for layer in module.layers] == [6, 6, 3]
    assert trainer.strategy.plan.reasons["recompute"] == (
        "as planned: the first 2 of 3 blocks of layers (Block), detected"
    )
    assert not any("forward" in vars(child) for child in module.modules())


def test_when_memory_runs_out_under_a_plan_all_blocks_recompute():
    class Middle(Deep):
        @property
        def recomputes(self):
            return "forward" in vars(self.layers[2])

    _, plain, _ = trained(Middle, None, False, recompute=True, rows=1)
    planned = Plans(RecomputePolicy(blocks=2))
    _, again, trainer = trained(Middle, 0.5, False, recompute="auto", rows=1, callbacks=[planned])

    assert_equal(plain, again)
    assert trainer.strategy.plan.reasons["recompute"] == (
        "because memory ran out: 3 blocks of layers (Block), detected"
    )
