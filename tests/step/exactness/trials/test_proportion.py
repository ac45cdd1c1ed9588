"""Backward passes that are not proportional to the loss.

Gradient hooks may add to gradients or keep them, and functions of autograd may return gradients of their own.
"""

import time

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.auxiliary import WithAuxiliaryLoss
from tests.support.modules.split import Net, run
from tests.support.runs.split_and_whole import same_cut_and_whole


class Hooked(Net):
    """Registers `hook` for the gradient of its first weight."""

    def __init__(self):
        super().__init__()
        self.count = 0.0
        self.net[0].weight.register_hook(self.hook)

    def on_after_backward(self):
        self.log("count", float(torch.as_tensor(self.count).sum()))


class Decays(Hooked):
    def hook(self, gradient):
        return gradient + 0.1 * self.net[0].weight.detach()


class Sums(Hooked):
    def hook(self, gradient):
        self.count += float(gradient.sum())


class Keeps(Hooked):
    def hook(self, gradient):
        self.count = gradient


class Averages(Hooked):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, 6))

    def hook(self, gradient):
        self.mean.mul_(0.9).add_(gradient, alpha=0.1)


class KeepsAccumulated(Hooked):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(self.keep)

    def hook(self, gradient):
        return gradient

    def keep(self, parameter):
        self.count = parameter.grad


class Auxiliary(Net):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch["x"])
        hidden = WithAuxiliaryLoss.apply(hidden, 0.1 * hidden.pow(2).mean())
        return F.cross_entropy(self.net[1:](hidden), batch["y"])


class Late(Auxiliary):
    """Has an auxiliary loss from the second batch on, which the loss does not show."""

    def training_step(self, batch, batch_idx):
        self.weight = 0.1 * (self.trainer.global_step > 0)
        hidden = self.net[0](batch["x"])
        hidden = WithAuxiliaryLoss.apply(hidden, self.weight * hidden.pow(2).mean())
        return F.cross_entropy(self.net[1:](hidden), batch["y"])


class InLaterBatches(Net):
    """Has an auxiliary loss and another graph from the second batch on, by a counter that nothing watches."""

    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch["x"])
        if is_late := self.trainer.fit_loop.total_batch_idx > 0:
            hidden = WithAuxiliaryLoss.apply(hidden, 0.1 * hidden.pow(2).mean())
        loss = F.cross_entropy(self.net[1:](hidden), batch["y"])
        return loss.square().sqrt() if is_late else loss


class Noisy(Hooked):
    def hook(self, gradient):
        return gradient + 0.01 * torch.randn_like(gradient)


class ClipsTheWhole(Hooked):
    def hook(self, gradient):
        return gradient / gradient.norm()


@first_cells(2, "kind", [Decays, Auxiliary, Sums, Keeps, Averages, KeepsAccumulated, Late, InLaterBatches])
def test_backward_passes_that_a_factor_of_the_loss_would_change_are_exact(kind):
    same_cut_and_whole(kind)


def test_they_are_exact_in_accumulation_windows():
    same_cut_and_whole(Decays, accumulate_grad_batches=2)


def test_a_gradient_hook_that_draws_is_said_to_draw_once_a_micro_batch(caplog):
    with caplog.at_level("INFO", logger="lightning_unified"):
        run(Noisy)

    assert "andom draws, such as dropout's, are made for each micro-batch" in caplog.text


def test_a_gradient_hook_that_scales_by_the_norm_is_refused():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(ClipsTheWhole, strategy=UnifiedStrategy(micro_batch_size=3))


class LogsTimes(Net):
    """Logs the time of each step."""

    def loss(self, out, batch):
        self.log("time", time.perf_counter())
        return F.cross_entropy(out, batch["y"])


def test_logs_that_differ_between_equal_runs_say_nothing():
    strategy = UnifiedStrategy(micro_batch_size=3)
    run(LogsTimes, strategy=strategy)

    assert strategy.policy.splits.passes.is_proportional
