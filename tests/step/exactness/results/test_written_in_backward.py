"""State that code in the backward pass writes, such as gradient hooks and repeated forward passes."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import run, same_cut_and_whole


class Counts(Net):
    """Logs what the backward pass of a batch has left."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_after_backward(self):
        self.log("count", float(self.count))


class OwnBackward(Counts):
    def backward(self, loss):
        loss.backward()
        self.count += 1


class GradientHook(Counts):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch["x"])
        hidden.register_hook(self.add)
        return F.cross_entropy(self.net[1:](hidden), batch["y"])

    def add(self, gradient):
        self.count += len(gradient)


class Repeated(Counts):
    """Runs its first layer in the forward and again in the backward pass."""

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.first, batch["x"], use_reentrant=False)
        self.log("count in step", float(self.count))
        return F.cross_entropy(self.net[1:](hidden), batch["y"])

    def first(self, x):
        self.count += 1
        return self.net[0](x)


class Average(Repeated):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def first(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.net[0](x)

    def on_after_backward(self):
        self.log("mean", self.mean.norm())


class ReadsBefore(Repeated):
    def on_before_zero_grad(self, optimizer):
        self.log("count before", float(self.count))


class WritesBefore(Repeated):
    def on_before_zero_grad(self, optimizer):
        self.count += 1


@pytest.mark.parametrize("kind", [OwnBackward, GradientHook, Repeated, Average, ReadsBefore])
def test_state_that_a_backward_pass_writes_is_that_of_the_whole_batch(kind):
    same_cut_and_whole(kind)


def test_state_that_a_hook_and_the_backward_pass_write_is_refused():
    with pytest.raises(
        SplitError, match=r"on_before_zero_grad writes WritesBefore\.count, and so does the backward pass"
    ):
        run(WritesBefore, UnifiedStrategy(micro_batch_size=3))
