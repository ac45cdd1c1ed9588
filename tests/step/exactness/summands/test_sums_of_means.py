"""Losses that add up means over different terms split exactly."""

import warnings

import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import ConfigurationError, SplitError
from tests.support.lanes import crossed, first_cells
from tests.support.modules import summed
from tests.support.modules.plain import fit, weights
from tests.support.modules.summed import Pretraining, Summed, loader
from tests.support.runs.split_and_whole import EXACT, run, same_cut_and_whole

SOUND = [
    *(summed.Pretraining, summed.TwoMasks, summed.Tasks, summed.Uncertain, summed.Penalized, summed.Stacked),
    *(summed.InPlace, summed.Checkpointed, summed.Preferring),
]
FAST = [(kind, 0, 3) for kind in SOUND] + [(summed.Penalized, 1, 3)]  # the last has micro-batches without tokens


@pytest.mark.parametrize(("kind", "seed", "size"), crossed(SOUND, range(3), (3, 5, 7), fast=FAST))
def test_a_sum_of_means_over_different_terms_splits_exactly(kind, seed, size):
    same_cut_and_whole(kind, size=size, loader=lambda: loader(seed), max_epochs=1)


def test_a_constant_is_logged_where_the_first_micro_batch_has_no_terms():
    def first_rows_lack_labels():
        made = loader()
        for at in range(40):
            made.dataset[at]["labels"][: 5 * (at % 16 < 3)] = -100
        return made

    same_cut_and_whole(summed.Penalized, size=3, loader=first_rows_lack_labels, max_epochs=1)


@pytest.mark.parametrize("kind", [summed.Switched, summed.AtLeastOne, summed.TwoMasks])
@pytest.mark.parametrize("size", [2, 3])
def test_micro_batches_without_terms_of_a_summand_split_exactly(kind, size):
    same_cut_and_whole(kind, size=size, loader=lambda: loader(1, sparse=True), max_epochs=1)


@pytest.mark.parametrize("kind", [summed.Late, summed.LateThird])
def test_a_summand_that_comes_later_is_found_before_its_update(kind):
    data = {"loader": lambda: loader(2, rows=64), "max_epochs": 2}
    whole, plain, _ = run(kind, "auto", **data)
    split, seen, _ = run(kind, UnifiedStrategy(micro_batch_size=3), **data)

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)
    for mine, theirs in zip(seen.callback_metrics, plain.callback_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@first_cells(
    2, "options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}]
)
def test_windows_and_clipping_see_the_whole_batchs_gradient(options):
    same_cut_and_whole(Pretraining, loader=lambda: loader(3), max_epochs=1, **options)


def test_a_simulated_machine_splits_a_sum_of_means_too():
    data = {"loader": lambda: loader(rows=24), "max_epochs": 1}
    whole, *_ = run(Pretraining, "auto", **data)
    strategy = UnifiedStrategy(micro_batch_size=3, budget="1GiB", simulate="rtx3060-12gb", predict=False)
    split, *_ = run(Pretraining, strategy, **data)

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


def test_all_logs_of_summands_merge_and_no_warning_comes():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="lightning|torch")
        _, _, trainer = run(Pretraining, UnifiedStrategy(micro_batch_size=3))

    assert not trainer.strategy.policy.splits.verdict.unmergeable


def test_the_reason_names_each_summand_and_its_weight():
    _, _, trainer = run(Summed, UnifiedStrategy(micro_batch_size=3))
    reason = trainer.strategy.plan.reasons["loss_weight"]

    assert "NllLoss of tokens: scored labels; NllLoss of rows: rows" in reason


class Hooked(Pretraining):
    """Logs the loss in a hook, and halves gradients when they are complete."""

    def __init__(self):
        super().__init__()
        for one in self.parameters():
            one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad * 0.5))

    def on_before_backward(self, loss):
        self.log("before", loss)


def test_hooks_around_the_backward_pass_see_one_micro_batch():
    same_cut_and_whole(Hooked, loader=lambda: loader(4))


def test_bf16_mixed_precision_stays_within_its_rounding():
    trained = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=3)):
        torch.manual_seed(0)
        module = Pretraining()
        fit(module, loader(dtype=torch.float32), strategy=strategy, precision="bf16-mixed", max_epochs=2)
        trained.append(weights(module))

    torch.testing.assert_close(*trained, rtol=2e-2, atol=2e-3)


REFUSED = {
    summed.Contrastive: r"adds up 2 summands \(NllLoss of tokens, Mean of trunk\)",
    summed.OfCounts: r"adds up 2 summands \(NllLoss of tokens, NllLoss of rows\)",
    summed.Product: "cannot be split exactly",
    summed.Reused: "cannot be split exactly",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_summands_that_have_no_weights_are_refused_by_name(kind):
    with pytest.raises(SplitError, match=REFUSED[kind]):
        run(kind, UnifiedStrategy(micro_batch_size=3))


def test_a_denominator_that_changes_is_refused_or_found_before_its_update():
    whole, *_ = run(summed.Exchanged, "auto", lambda: loader(0, rows=96))
    try:
        split, *_ = run(summed.Exchanged, UnifiedStrategy(micro_batch_size=3), lambda: loader(0, rows=96))
    except SplitError:
        return
    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


def test_windows_by_terms_refuse_a_loss_without_one_number_of_terms():
    with pytest.raises(ConfigurationError, match="is a sum of means over different terms"):
        run(Summed, UnifiedStrategy(micro_batch_size=3, window_mean="terms"), accumulate_grad_batches=2)


class Adding(Summed):
    """Adds a number to a gradient."""

    def __init__(self):
        super().__init__()
        self.trunk.weight.register_hook(lambda gradient: gradient + 0.1)


def test_a_hook_that_adds_to_gradients_is_refused():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(Adding, UnifiedStrategy(micro_batch_size=3))


class Declared(Summed):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_weight=lambda batch: (batch["labels"] != -100).sum())


def test_a_declared_weight_stays_the_only_rule():
    with pytest.raises(SplitError, match="loss_weight: "):
        run(Declared, UnifiedStrategy(micro_batch_size=3))
