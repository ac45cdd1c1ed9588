"""A check leaves nothing behind: a run with it is bit for bit the run without."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import MLP, weights
from tests.support.modules.split import BatchNorm, Contrastive, Dropout, Mean, Net, ShiftedTokens, found, run


class Draws(Net):
    """Draws from every generator, and keeps the draws of each batch's last micro-batch."""

    def loss(self, out, batch):
        torch.rand(1), random.random(), np.random.random()
        return super().loss(F.dropout(out, 0.3), batch)


class Logs(MLP):
    """Logs, metrics, outputs, and dropout."""

    def __init__(self):
        super().__init__(dropout=0.4)


class ChangesBatch(Net):
    """Writes its batch in place, and asks for gradients of it."""

    def training_step(self, batch, batch_idx):
        batch["x"].add_(1.0)
        batch["new"] = batch["x"].clone().requires_grad_()
        return F.cross_entropy(self.net(batch["new"]), batch["y"])


class Modes(Net):
    """Has layers in eval mode, a frozen parameter, and gradients of its own."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()
        self.net[0].bias.requires_grad_(False)

    def loss(self, out, batch):
        return super().loss(self.drop(out), batch)


KINDS = [Mean, Draws, Logs, Dropout, BatchNorm, ChangesBatch, Modes]


@first_cells(
    3,
    ("kind", "window", "precision"),
    crossed(
        KINDS,
        [1, 2],
        ["64-true", "bf16-mixed"],
        fast=[*((kind, 1, "64-true") for kind in KINDS), (Draws, 2, "bf16-mixed"), (Logs, 2, "bf16-mixed")],
    ),
)
def test_a_run_with_the_check_is_bit_for_bit_the_run_without(kind, window, precision):
    results = []
    for check in (True, False):
        random.seed(0), np.random.seed(0)
        strategy = UnifiedStrategy(micro_batch_size=3, batch_norm="micro", check_split=check)
        module, seen, _ = run(kind, strategy=strategy, precision=precision, accumulate_grad_batches=window)
        generators = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        modes = [child.training for child in module.modules()]
        results.append((module, seen, generators, modes))
    (checked, seen, generators, modes), (plain, twin, plain_generators, plain_modes) = results

    assert torch.equal(weights(checked), weights(plain))
    assert generators == plain_generators
    assert modes == plain_modes
    for mine, other in zip(checked.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert all(torch.equal(mine, other) for mine, other in zip(seen.gradients, twin.gradients, strict=True))
    if kind is not Logs:  # some of its values are put together by what the check has found
        assert seen.callback_metrics == twin.callback_metrics


@first_cells(1, "kind", [Mean, Dropout, Logs])
def test_a_check_keeps_nothing_that_it_has_made(kind):
    module, _, _ = run(kind)

    assert all(parameter.grad is None or parameter.grad.shape == parameter.shape for parameter in module.parameters())
    assert "log" not in vars(module.trainer.fit_loop.epoch_loop._results)
    assert all(not parameter._backward_hooks for parameter in module.parameters())


def test_the_check_runs_no_hooks_around_the_backward_pass():
    before, steps = [], []
    note_before, note_step = before.append, steps.append  # lists that the step names would be put back

    class Counts(Mean):
        def on_before_backward(self, loss):
            note_before(1)

        def loss(self, out, batch):
            note_step(1)
            return super().loss(out, batch)

    run(Counts, limit_train_batches=1, max_epochs=1)

    assert len(before) == 3  # one batch of eight rows, as 3, 3, 2
    # the rows whole, and split in two ways; the smallest micro-batch also with half its loss
    assert len(steps) == 3 + 1 + 3 + 3 + 1


@first_cells(1, "only_cudnn", [False, True])
def test_the_check_leaves_cudnns_attention_out_where_there_is_another(only_cudnn):
    kernels, seen = torch.backends.cuda, []
    note = seen.append  # a list that the step names would be put back

    class Noted(Mean):
        def training_step(self, batch, batch_idx=0):
            note(kernels.cudnn_sdp_enabled())
            return super().training_step(batch, batch_idx)

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *([] if only_cudnn else [SDPBackend.MATH])]):
        run(Noted)
        assert kernels.cudnn_sdp_enabled()

    assert seen[0] is only_cudnn
    assert seen[-1]  # what is trained keeps its kernel


def test_a_second_fit_checks_its_own_module():
    strategy = UnifiedStrategy(micro_batch_size=3)
    module, _, _ = run(Mean, strategy=strategy)
    other = copy.deepcopy(module)
    other.__class__ = Contrastive

    module.trainer.fit_loop.max_epochs = 4

    with pytest.raises(SplitError, match="Contrastive cannot be split"):
        module.trainer.fit(other, Net.loader())


def test_rules_given_to_the_strategy_are_the_modules_rules():
    rules = MicroBatchRules(loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum())

    assert found(run(ShiftedTokens, strategy=UnifiedStrategy(micro_batch_size=3, micro_batches=rules))[2]).startswith(
        "loss_weight: "
    )
