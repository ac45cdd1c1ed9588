"""A network whose calls are recorded, and what tests of recorded calls do with it."""

import torch
from torch import nn

from lightning_unified.nn.cuda_graphs.shapes import SETTLED

IDS = torch.arange(24).reshape(4, 6)


class Net(nn.Module):
    """Two layers with dropout, tied weights, a frozen table and a parameter that is not used."""

    def __init__(self, width=16, *, dropout=0.0):
        super().__init__()
        self.table, self.first = nn.Embedding(50, width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight
        self.frozen, self.unused = nn.Embedding(50, width).requires_grad_(False), nn.Parameter(torch.zeros(3))

    def forward(self, ids, scale=None):
        x = self.table(ids) + self.frozen(ids)
        x = self.norm(self.drop(self.first(x).relu()))
        return self.head(x if scale is None else x * scale)


def settle(network, *calls, times=None):
    """Train on each of the calls until all are recorded, or so many times."""
    for _ in range(times or SETTLED + 1):
        for call in calls:
            network(call).sum().backward()
    network.zero_grad()


def gradients(network):
    return {name: None if one.grad is None else one.grad.clone() for name, one in network.named_parameters()}


def step(net, ids=IDS, **kwargs):
    loss = net(ids, **kwargs).float().square().mean()
    loss.backward()
    return loss.item()


def calls_of(net):
    """Return a list that grows whenever the forward of `net` runs eagerly."""
    ran, forward = [], net.forward
    net.forward = lambda *args, **kwargs: (ran.append(1), forward(*args, **kwargs))[1]
    return ran
