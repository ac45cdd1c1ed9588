"""Small decoders that know nothing of this package, and their gradients with lazy logits.

Their output heads have several forms.
"""

import torch
from torch import nn
from torch.nn import functional

from lightning_unified.nn.lazy_logits import LazyHeads

CLASSES, WIDTH = 2048, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """A decoder that returns its loss; `head` says how it computes its logits."""

    def __init__(self, head="linear"):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.kind, self.kinds = nn.LayerNorm(WIDTH), head, []
        self.bias = nn.Parameter(torch.linspace(-1, 1, CLASSES))
        if head in ("linear", "tied linear"):
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
            if head == "tied linear":
                self.head.weight = self.tokens.weight

    def logits(self, hidden):
        match self.kind:
            case "functional":
                return functional.linear(hidden, self.tokens.weight)
            case "functional with bias":
                return functional.linear(hidden.reshape(-1, WIDTH), weight=self.tokens.weight, bias=self.bias)
            case "transposed":
                return (hidden * 0.5) @ self.tokens.weight.T
            case "matmul":
                return torch.matmul(functional.dropout(hidden, 0.0), self.tokens.weight.t()) / 0.7
            case _:
                return self.head(hidden)

    def forward(self, ids):
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.logits(self.norm(hidden)[:, :-1])
        self.kinds.append(type(logits))
        return functional.cross_entropy(logits.float().reshape(-1, CLASSES), ids[:, 1:].flatten())


FORMS = ("linear", "tied linear", "functional", "functional with bias", "transposed", "matmul")


class Using(Decoder):
    """A decoder without blocks, whose logits go to a function."""

    def forward(self, ids, use):
        return use(self.logits(self.norm(self.tokens(ids))))


def plain_and_lazy(model, *args):
    """Return the loss and all gradients of `model(*args)` with plain logits, then with lazy ones."""
    both = []
    for is_lazy in (False, True):
        model.zero_grad()
        heads = LazyHeads(model, 5) if is_lazy else None
        loss = model(*args)
        loss.backward()
        if heads is not None:
            heads.remove()
        both.append((loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}))
    return both
