"""Steps that read gradients of the batch before, which Lightning zeroes after the step."""

import copy

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.step.exactness.parameters.earlier_gradients import GradientReadError, GradientReads
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import same_cut_and_whole


class Reads(Net):
    """Weights its loss by the norm of a gradient of the batch before."""

    first = 0

    def loss(self, out, batch):
        gradient = self.net[0].weight.grad if self.global_step >= self.first else None
        norm = torch.zeros(()) if gradient is None else gradient.norm()
        self.log("norm", norm)
        return F.cross_entropy(out, batch["y"]) / (1 + norm)


class ReadsLater(Reads):
    first = 2


class ReadsWithoutQuestion(Net):
    """Expects a gradient after the first batch, and has dropout."""

    def loss(self, out, batch):
        loss = F.cross_entropy(out, batch["y"])
        return loss * self.net[0].weight.grad.norm() if self.global_step else loss


class Clips(Net):
    def loss(self, out, batch):
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0))
        return F.cross_entropy(out, batch["y"])


@first_cells(2, "kind", [Reads, ReadsWithoutQuestion, ReadsLater, Clips])
def test_steps_find_the_gradients_of_the_batch_before(kind):
    same_cut_and_whole(kind)


def test_steps_find_those_of_their_accumulation_window():
    same_cut_and_whole(Reads, accumulate_grad_batches=2)


def test_reads_are_noticed_until_the_gradient_is_written():
    one, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    with GradientReads([one]):
        assert other.grad is None
        with pytest.raises(GradientReadError):
            _ = one.grad
        one.grad = torch.zeros(1)
        assert one.grad == 0

    assert "grad" not in vars(torch.Tensor)


def test_code_that_drops_or_copies_gradients_does_not_read_them():
    layer = torch.nn.Linear(2, 2)
    with GradientReads(layer.parameters()):
        layer.zero_grad()
        torch.optim.SGD(layer.parameters(), 0.1).zero_grad()
        copy.deepcopy(layer)
        layer.double()


def test_compilation_does_not_read_gradients():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    for one in layer.parameters():
        one.grad = torch.ones_like(one)
    with GradientReads(layer.parameters()):
        assert torch.allclose(compiled(torch.ones(3, 2)), layer(torch.ones(3, 2)))
