"""Weights move out of shared segments: which ones, and what stays as it was."""

import pytest
import torch
from torch import nn

from lightning_unified.planner.first_batch import moved_weights
from lightning_unified.planner.first_batch.moved_weights import move_weights

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.shared, self.large = (nn.Linear(width, width, bias=False) for width in (64, 1024, 2048))
        self.tied = self.shared
        self.register_buffer("table", torch.empty_strided((1024, 1024), (1, 1024)).normal_())


def addresses(net):
    return {name: one.data_ptr() for name, one in (*net.named_parameters(), *net.named_buffers())}


def test_only_tensors_that_share_segments_move():
    net = Net()
    before, values = addresses(net), {name: one.clone() for name, one in net.state_dict().items()}
    parameters, strides = [*net.parameters()], net.table.stride()
    move_weights(net, CPU)
    now = addresses(net)

    assert {name for name in before if before[name] != now[name]} == {"shared.weight", "table"}
    assert all(own is one for own, one in zip(net.parameters(), parameters, strict=True))
    assert net.table.stride() == strides
    assert all(torch.equal(one, values[name]) for name, one in net.state_dict().items())


def test_an_optimizer_goes_on_with_weights_that_moved():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    net.shared(torch.ones(1, 1024)).sum().backward()
    move_weights(net, CPU)
    expected = net.shared.weight.detach() - 0.5 * net.shared.weight.grad
    optimizer.step()

    assert torch.equal(net.shared.weight, expected)


def test_memory_that_another_tensor_uses_stays():
    net = Net()
    view, before = net.shared.weight.detach()[0], addresses(net)
    move_weights(net, CPU)

    assert addresses(net)["shared.weight"] == before["shared.weight"]
    assert view.data_ptr() == before["shared.weight"]


def test_nothing_moves_while_a_graph_holds_addresses(monkeypatch):
    monkeypatch.setattr(moved_weights, "graphs_exist", lambda: True)
    net = Net()
    before = addresses(net)
    move_weights(net, CPU)

    assert addresses(net) == before


def test_memory_that_runs_out_leaves_the_rest_where_it_is(monkeypatch):
    net = Net()
    before, values = addresses(net), net.shared.weight.detach().clone()

    def fail(*_, **__):
        raise torch.OutOfMemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", fail)
        move_weights(net, CPU)

    assert addresses(net) == before
    assert torch.equal(net.shared.weight, values)
