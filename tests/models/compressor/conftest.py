"""A compressor small enough for tests, and a ragged batch for it."""

import pytest
import torch

from lightning_unified.models.compressor.module import Compressor


@pytest.fixture
def build():
    """Return a function that builds the tiny float64 compressor with fixed weights."""

    def make(**changes):
        torch.manual_seed(3)
        return Compressor(**{"preset": "compressor-tiny", "warmup_steps": 1, **changes}).double()

    return make


@pytest.fixture
def batch():
    """Return 6 texts of up to 12 tokens with continuations of up to 5.

    The last row is padding.
    """
    generator = torch.Generator().manual_seed(5)
    sides = []
    for width, lengths in ((12, (12, 7, 9, 4, 11, 0)), (5, (5, 5, 0, 3, 5, 0))):
        mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        sides += [torch.randint(9, 300, (6, width), generator=generator) * mask, mask]
    return dict(zip(("input_ids", "mask", "continuation", "continuation_mask"), sides, strict=True))


@pytest.fixture
def padded():
    """Return a function that pads a prepared batch.

    It adds three columns and two rows of padding.
    """

    def pad(prepared):
        wider = {
            name: torch.nn.functional.pad(values, (0, 3)) if values.ndim > 1 else values
            for name, values in prepared.items()
        }
        return {
            name: torch.cat([values, torch.zeros_like(values[:2])]) if values.ndim else values
            for name, values in wider.items()
        }

    return pad


@pytest.fixture
def gradients():
    """Return a function that maps parameter names to the gradients of a loss.

    A parameter without a gradient has None.
    """

    def compute(model, loss):
        model.zero_grad()
        loss.backward()
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }

    return compute
