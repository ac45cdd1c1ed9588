"""A transformer whose calls are recorded on a GPU, and its steps."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from lightning_unified.nn.cuda_graphs.shapes import SETTLED


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.p = nn.Dropout(dropout), dropout

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return x + self.drop(self.out(mixed.transpose(1, 2).reshape(B, T, D)).relu())


class Net(nn.Module):
    """Attention, tied and frozen weights, one parameter that is not used."""

    def __init__(self, *, dropout=0.0, width=64, depth=2):
        super().__init__()
        self.table, self.frozen = nn.Embedding(100, width), nn.Embedding(100, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        x = self.table(ids) + self.frozen(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts(rows=4, length=16, *, seed=0):
    return torch.randint(100, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def step(net, ids, *, autocast=False):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = cross_entropy(net(ids).float().flatten(0, 1), ids.flatten())
    loss.backward()
    return loss.item()


def settle(net, *batches, **settings):
    for _ in range(SETTLED + 1):
        for ids in batches:
            step(net, ids, **settings)
    net.zero_grad()


def assert_same(net, other, *, autocast=False):
    for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            tolerance = {"rtol": 2e-2, "atol": 2e-4} if autocast else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(
                ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance
            )
