"""Networks that are no language models.

A perceptron, convolutions, recurrent nets, a U-Net and message passing on graphs.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Convolutional", "Graph", "Perceptron", "Recurrent", "Residual", "UNet"]


class Perceptron(nn.Module):
    """Linear layers with GELU between them; rebuilds what it is given."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


class Convolutional(nn.Module):
    """Convolution, BatchNorm, ReLU, over and over, halving the image every other time.

    The module classifies.
    """

    def __init__(self, *, width: int, depth: int, classes: int = 100) -> None:
        super().__init__()
        layers, channels = [], 3
        for index in range(depth):
            out = width * 2 ** (index // 2)
            layers += [nn.Conv2d(channels, out, 3, stride=1 + index % 2, padding=1, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.ReLU(inplace=True)]
            channels = out
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(image).mean((2, 3))), label)


class _ResidualBlock(nn.Module):
    def __init__(self, inner: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Conv2d(inner, out, 1, stride=stride, bias=False) if stride > 1 or inner != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class Residual(nn.Module):
    """A residual net of four stages; classifies."""

    def __init__(self, *, width: int, blocks: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width))
        sizes = [width * 2**stage for stage in range(4)]
        self.blocks = nn.Sequential(
            *[
                _ResidualBlock(
                    sizes[max(stage - 1, 0)] if first else sizes[stage],
                    sizes[stage],
                    stride=2 if first and stage else 1,
                )
                for stage in range(4)
                for first in [True] + [False] * (blocks - 1)
            ]
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(image)), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), label)


class Recurrent(nn.Module):
    """An LSTM or a GRU that reads tokens and predicts the next one."""

    def __init__(self, *, cell: str, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[cell]
        self.layers = kind(width, width, depth, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.table(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class _Pair(nn.Sequential):
    """Two convolutions with group norm."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(inner, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Down, across and up, with the images of the way down put beside those of the way up.

    The module removes noise.
    """

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(_Pair(inner, out) for inner, out in itertools.pairwise(sizes))
        self.middle = _Pair(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(_Pair(2 * out, inner) for inner, out in reversed(list(itertools.pairwise(sizes))))

    def forward(self, image: Tensor) -> Tensor:
        x, beside = self.enter(image + torch.randn_like(image)), []
        for block in self.down:
            x = block(x)
            beside.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), beside.pop()], 1))
        return F.mse_loss(self.leave(x), image)


class _Messages(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        messages = F.relu(self.message(torch.cat([x[sources], x[targets]], -1)))
        gathered = torch.zeros_like(x).index_add(0, targets, messages.to(x.dtype))
        return self.norm(x + self.update(torch.cat([x, gathered], -1)))


class Graph(nn.Module):
    """Message passing by gather and scatter over graphs of equal size.

    The graphs lie side by side as one, and each node has a class.
    """

    layer: Callable[[int], nn.Module] = _Messages

    def __init__(self, *, features: int, width: int, depth: int, classes: int = 16) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(features, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(type(self).layer(width) for _ in range(depth))

    def forward(self, nodes: Tensor, edges: Tensor, label: Tensor) -> Tensor:
        graphs, count, _ = nodes.shape
        offsets = torch.arange(graphs, device=nodes.device)[:, None, None] * count
        sources, targets = (edges + offsets).permute(1, 0, 2).flatten(1)
        x = self.enter(nodes.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, sources, targets)
        return F.cross_entropy(self.head(x), label.flatten())
