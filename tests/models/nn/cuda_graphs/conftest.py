"""Recordings without a GPU: what a graph would repeat is run again by Python."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._pytree import tree_flatten

from lightning_unified.nn.cuda_graphs import graphs as cuda_graphs
from lightning_unified.nn.cuda_graphs.gradient_buffer import differentiate
from lightning_unified.nn.cuda_graphs.recording import _TENSOR, Recording
from tests.support.modules.recorded.cpu import Net


@pytest.fixture
def graphs_by_python(monkeypatch):
    """Calls are recorded and replayed on the CPU."""
    monkeypatch.setattr(cuda_graphs, "record", record)
    monkeypatch.setattr(cuda_graphs, "rehearse", lambda network, call, *, buffer, written: None)
    monkeypatch.setattr(cuda_graphs, "free_workspaces", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Graph:
    """A graph is what it replays."""

    def __init__(self, replay):
        self.replay = replay


@contextmanager
def capturing():
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def record(network, call, *, buffer, written, pool):
    """Stand in for `cuda_graph_recording.record`: the same record, whose graphs are functions."""
    del pool
    inputs, (args, kwargs) = call.tensors, call.arguments()
    own = dict(network.named_parameters())
    live = {}

    def run():
        leaves = {name: own[name].detach().requires_grad_() for name in buffer.parameters}
        on, dtype = call.autocast
        with capturing(), torch.enable_grad(), torch.autocast("cpu", dtype, enabled=on, cache_enabled=False):
            flat, spec = tree_flatten(torch.func.functional_call(network, leaves, args, kwargs))
        return leaves, flat, spec

    before = [(one, one.clone()) for one in (*written, *buffer.blocks)]  # at a recording nothing is computed
    state = torch.get_rng_state()
    leaves, flat, spec = run()
    torch.set_rng_state(state)
    outputs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    incoming = [torch.zeros_like(one) if one.requires_grad else None for one in outputs]
    wanted = [one for one in inputs if one.requires_grad]
    with torch.autograd._unsafe_preserve_version_counter(tuple(one for one, _ in before)):
        used, _ = differentiate(outputs, leaves=leaves, inputs=wanted, incoming=incoming, buffer=buffer)
        for one, was in before:
            one.copy_(was)
    left = iter(torch.zeros_like(one) for one in wanted)
    static = [one.detach().clone() for one in outputs]
    recording = Recording(
        forward=Graph(lambda: forward()),
        backward=Graph(lambda: backward()),
        inputs=inputs,
        outputs=static,
        structure=([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], spec),
        incoming=incoming,
        buffer=buffer,
        used=used,
        of_inputs=[next(left) if one.requires_grad else None for one in inputs],
        written=written,
    )

    def forward():
        live["leaves"], again, _ = run()
        live["outputs"] = [leaf for leaf in again if isinstance(leaf, torch.Tensor)]
        for to, one in zip(static, live["outputs"], strict=True):
            to.copy_(one.detach())

    def backward():
        _, found = differentiate(
            live["outputs"], leaves=live["leaves"], inputs=wanted, incoming=incoming, buffer=buffer
        )
        for to, one in zip([one for one in recording.of_inputs if one is not None], found, strict=True):
            to.copy_(one)

    return recording


@pytest.fixture
def net():
    return Net()
