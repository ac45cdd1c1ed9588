"""A failed optimizer step is classified by whether it has written to any weight."""

import pytest
import torch
from torch import nn

from lightning_unified.step.recovery.weights import WeightsWatch


class Own(torch.optim.AdamW):
    """Of another's making: what it does before the kernel is not known."""


KINDS = {
    "Adam": (torch.optim.Adam, {"fused": True}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"fused": True}),
    "SGD": (torch.optim.SGD, {"fused": True}),
    "SGD with momentum": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "own AdamW": (Own, {"fused": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "for-loop": (torch.optim.AdamW, {"foreach": False}),
}


def optimizer_of(name):
    kind, options = KINDS[name]
    optimizer = kind([nn.Parameter(torch.ones(size)) for size in (3, 2)], lr=0.1, **options)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    return optimizer


@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_wrote_is_not_vouched_for_and_one_that_did_not_is(name):
    optimizer = optimizer_of(name)
    for _ in range(3):  # the first one makes the state
        assert WeightsWatch(optimizer).restore()
        watch = WeightsWatch(optimizer)
        optimizer.step()
        assert not watch.restore()


@pytest.mark.parametrize("name", KINDS)
def test_a_single_weight_that_was_written_is_noticed_whatever_the_kernel(name):
    optimizer = optimizer_of(name)
    for _ in range(2):
        optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            watch = WeightsWatch(optimizer)
            with torch.no_grad():
                parameter.add_(1)
            assert not watch.restore()


def test_weights_are_copied_only_where_no_counter_would_tell():
    for name, copies in (("AdamW", 0), ("own AdamW", 2), ("SGD", 2), ("foreach", 0)):
        optimizer = optimizer_of(name)
        assert len(WeightsWatch(optimizer)._samples) == (0 if name == "foreach" else 2)
        optimizer.step()
        assert len(WeightsWatch(optimizer)._samples) == copies
