"""What cannot be recorded is found by looking at an eager call, and said."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_unified.nn.checkpoint import recompute
from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.nn.cuda_graphs import graphs as cuda_graphs
from lightning_unified.nn.cuda_graphs.shapes import SETTLED

pytestmark = pytest.mark.usefixtures("graphs_by_python")


def settle(net, x):
    for _ in range(SETTLED + 1):
        net(x).sum().backward()


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.outside = nn.Linear(4, 4), how, [torch.ones(4, requires_grad=True)]
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        y = self.linear(x)
        if self.how == "item":
            return y * y.sum().item()
        if self.how == "mask":
            return y[y > 0]
        if self.how == "assigned mask":
            y[y > 0] = y.new_ones(1)
            return y
        if self.how == "checkpoint":
            return checkpoint(torch.sin, y, use_reentrant=False)
        if self.how == "reentrant":
            return checkpoint(torch.sin, y, use_reentrant=True)
        if self.how == "outside":
            return y * self.outside[0]
        if self.how == "rebinds":
            self.count = self.count + 1
            return y
        if self.how == "counts":
            self.calls += 1
            return y
        if self.how == "draws in Python":
            return y * random.random()
        if self.how == "draws in NumPy":
            return y * float(np.random.rand())
        if self.how == "list":
            return [y, "words"]
        if self.how == "detached":
            return y.detach()
        return y + x.add_(1.0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("item", "_local_scalar_dense waits for values"),
        ("mask", "takes a mask"),
        ("assigned mask", "takes a mask"),
        ("checkpoint", "recomputed, moved or packed"),
        ("reentrant", "use_reentrant=True"),
        ("outside", "no parameter of its own"),
        ("rebinds", "replaces tensors, or changes numbers"),
        ("counts", "replaces tensors, or changes numbers"),
        ("draws in Python", "draws from Python's or NumPy's random generator"),
        ("draws in NumPy", "draws from Python's or NumPy's random generator"),
        ("list", "other than tensors and None"),
        ("detached", "none of its outputs requires a gradient"),
        ("in place", "writes into its arguments"),
    ],
)
def test_what_cannot_be_recorded_is_found_without_recording_it_and_said(how, reason, caplog, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "record", lambda *_, **__: pytest.fail("it was recorded"))
    net = Odd(how)
    RecordedCalls(net)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        for _ in range(SETTLED + 2):
            net(torch.randn(2, 4))

    assert caplog.text.count("runs eagerly as it is now") >= 1
    assert reason in caplog.text


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_modules_with_hooks_are_not_recorded(hook, caplog):
    net = nn.Sequential(nn.Linear(4, 4))
    getattr(net[0], hook)(lambda *_: None)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        recorded = RecordedCalls(net)
    settle(net, torch.randn(2, 4))

    assert recorded.recorded == 0
    assert "0 (Linear) has hooks" in caplog.text


def test_compiled_parts_are_recorded_and_their_operations_are_not_looked_at():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x[x > 0].numel()

    net = nn.Sequential(Masked(4, 4))
    net[0]._compiled_call_impl = net[0]._call_impl  # as `Module.compile` sets it
    recorded = RecordedCalls(net)
    settle(net, torch.randn(2, 4))

    assert recorded.recorded == 1
    assert net[0]._compiled_call_impl == net[0]._call_impl


def test_all_shapes_of_compiled_parts_are_rehearsed_before_the_first_is_recorded(monkeypatch):
    net, done = nn.Sequential(nn.Linear(4, 4)), []
    net[0]._compiled_call_impl = net[0]._call_impl  # as `Module.compile` sets it
    own = cuda_graphs.record
    monkeypatch.setattr(cuda_graphs, "rehearse", lambda network, call, **_: done.append(("rehearse", call.elements)))
    monkeypatch.setattr(
        cuda_graphs,
        "record",
        lambda network, call, **_: done.append(("record", call.elements)) or own(network, call, **_),
    )
    RecordedCalls(net)
    for _ in range(SETTLED):
        for rows in (2, 3):
            net(torch.randn(rows, 4)).sum().backward()

    assert done == [("rehearse", 12), ("rehearse", 8), ("record", 12), ("record", 8)]


def test_a_compiled_block_that_the_network_checkpoints_runs_again_after_the_look():
    class Checkpoints(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return recompute(self.block, self.first(x))

    net, x = Checkpoints(), torch.ones(2, 4)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    net.block.compile(backend="eager")
    calls = RecordedCalls(net)
    got = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert not calls.is_refused
    torch.testing.assert_close(got, expected)


def test_networks_with_compiled_functions_or_sparse_gradients_are_not_recorded(caplog):
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled[0].activation = torch.compile(torch.relu, backend="eager")
    sparse = nn.Sequential(nn.Embedding(50, 4, sparse=True))
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        recorded = [RecordedCalls(compiled), RecordedCalls(sparse)]
        settle(compiled, torch.randn(2, 4))
        settle(sparse, torch.arange(4))

    assert [one.recorded for one in recorded] == [0, 0]
    assert "0 (Linear) calls a function that torch.compile returned" in caplog.text
    assert "0 (Embedding) has sparse gradients" in caplog.text
