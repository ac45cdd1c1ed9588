"""Writes into parts of lazy logits stay where they would in a plain tensor, and addresses stay valid."""

import ctypes

import pytest
import torch
from torch.nn import functional

from tests.support.modules.decoders import CLASSES, Using, plain_and_lazy

IDS = torch.arange(3, 17).reshape(2, 7)
NEXT = IDS[:, 1:].flatten()


def into_a_reshaped_copy(logits):
    flat = logits[:, :-1].reshape(-1, CLASSES)
    flat[:, 3] = -5.0
    return functional.cross_entropy(flat, NEXT)


def into_masked_positions(logits):
    scored = logits[IDS > 5]
    scored.masked_fill_(torch.arange(CLASSES) % 7 == 0, -3.0)
    return functional.cross_entropy(scored, IDS[IDS > 5])


def into_a_contiguous_copy(logits):
    shifted = logits[:, :-1].contiguous()
    shifted[..., 3] = -5.0
    own = functional.cross_entropy(logits.view(-1, CLASSES), IDS.flatten())
    return own + functional.cross_entropy(shifted.view(-1, CLASSES), NEXT)


def into_a_view(logits):
    logits[:, :-1][..., 3] = -5.0
    return functional.cross_entropy(logits.view(-1, CLASSES), IDS.flatten())


def added_in_place(logits):
    flat = logits[:, 1:].flatten(0, 1)
    flat += 1.5 * torch.arange(CLASSES) / CLASSES
    return functional.cross_entropy(flat, NEXT)


def into_chosen_rows(logits):
    chosen = logits[torch.tensor([1, 0])]
    chosen[0] *= 2
    return functional.cross_entropy(chosen.reshape(-1, CLASSES), IDS.flatten()) + logits.square().mean()


def read_as_a_contiguous_copy(logits):
    return logits[:, :-1].contiguous().view(-1, CLASSES).softmax(-1).square().sum()


class Kernel(torch.autograd.Function):
    """Reads its argument by its address, as a kernel of the user's own does."""

    @staticmethod
    def forward(ctx, value):
        value = value.contiguous()
        address, count = value.data_ptr(), value.numel()
        others = [torch.full((count,), 7.0, dtype=value.dtype) for _ in range(4)]  # would reuse freed memory
        entries = torch.frombuffer((ctypes.c_double * count).from_address(address), dtype=torch.float64).clone()
        del others
        return entries.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return None


def read_by_address(logits):
    return Kernel.apply(logits[:, :-1]) + functional.cross_entropy(logits.view(-1, CLASSES), IDS.flatten())


@pytest.mark.parametrize("form", ["linear", "functional"])
@pytest.mark.parametrize(
    "use",
    [
        into_a_reshaped_copy,
        into_masked_positions,
        into_a_contiguous_copy,
        into_a_view,
        added_in_place,
        into_chosen_rows,
        read_as_a_contiguous_copy,
        read_by_address,
    ],
)
def test_loss_and_gradients_equal_those_of_plain_logits(form, use):
    torch.testing.assert_close(*plain_and_lazy(Using(form).double(), IDS, use))
