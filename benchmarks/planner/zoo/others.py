"""Networks over graphs, points, tables and coordinates.

Scattered attention, nearest neighbours, sparse tables, losses over pairs, derivatives of networks, and parametrized weights.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.planner.zoo.networks import Graph

__all__ = [
    "Coordinates", "Ensemble", "Flow", "GraphAttention", "Pairs", "Physics", "PointCloud", "Quantized", "Tables", "Triangles",
]  # fmt: skip


class _Attends(nn.Module):
    """Attention over a graph's edges: softmax per node by scattered maxima and sums."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.linear, self.score = nn.Linear(width, width, bias=False), nn.Parameter(torch.randn(2, 4, width // 4) * 0.1)

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (self.heads, -1))
        scores = F.leaky_relu(((h * self.score[0]).sum(-1))[sources] + ((h * self.score[1]).sum(-1))[targets], 0.2)
        spread = targets[:, None].expand_as(scores)
        most = torch.zeros(len(x), self.heads, device=x.device, dtype=scores.dtype)
        most = most.scatter_reduce(0, spread, scores, "amax", include_self=False)
        weights = (scores - most[targets]).exp()
        sums = torch.zeros_like(most).to(weights.dtype).scatter_add(0, spread, weights)
        weights = weights / sums[targets].clamp_min(1e-6)
        messages = h[sources] * weights[..., None]
        out = torch.zeros_like(h, dtype=messages.dtype).index_add(0, targets, messages)
        return F.elu(out.flatten(1)) + x


class GraphAttention(Graph):
    """Attention over edges; a class for each node of graphs that lie side by side."""

    layer = _Attends


class PointCloud(nn.Module):
    """Maxima over each point's nearest neighbours, by `cdist` and `topk`; classifies clouds."""

    def __init__(self, *, width: int, depth: int, near: int, classes: int = 100) -> None:
        super().__init__()
        self.near = near
        sizes = [3, *[width] * depth]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * a, b), nn.LayerNorm(b), nn.GELU()) for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, points: Tensor, label: Tensor) -> Tensor:
        x = points
        for layer in self.layers:
            near = torch.cdist(x, x).topk(self.near, largest=False).indices
            found = x.gather(1, near.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, near.shape[1:])
            own = x[:, :, None].expand_as(found)
            x = layer(torch.cat([own, found - own], -1)).amax(2)
        return F.cross_entropy(self.head(x.amax(1)), label)


class Tables(nn.Module):
    """Summed embeddings of several entries a field, and products of fields; a recommender."""

    def __init__(self, *, fields: int, entries: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(entries, width, mode=("sum", "mean", "max")[at % 3]) for at in range(fields)
        )
        self.numbers = nn.Sequential(
            nn.Linear(13, 4 * width), nn.ReLU(), nn.BatchNorm1d(4 * width), nn.Linear(4 * width, width)
        )
        count = (fields + 1) * fields // 2
        self.top = nn.Sequential(nn.Linear(count + width, 512), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(512, 1))
        rows, columns = torch.triu_indices(fields + 1, fields + 1, offset=1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, numbers: Tensor, chosen: Tensor, clicked: Tensor) -> Tensor:
        dense = self.numbers(numbers)
        found = torch.stack([dense, *[table(ids) for table, ids in zip(self.tables, chosen.unbind(1), strict=True)]], 1)
        products = torch.bmm(found, found.transpose(1, 2))[:, self.rows, self.columns]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, products], 1))[:, 0], clicked)


class Coordinates(nn.Module):
    """Radiance field: Fourier features along rays, weight-normed layers, sums per ray."""

    def __init__(self, *, width: int, depth: int, samples: int, frequencies: int = 10) -> None:
        super().__init__()
        self.samples = samples
        self.register_buffer("powers", 2.0 ** torch.arange(frequencies))
        sizes = [6 * frequencies + 3, *[width] * depth]
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Linear(a, b)) for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, origin: Tensor, direction: Tensor, color: Tensor) -> Tensor:
        along = torch.linspace(0.1, 4.0, self.samples, device=origin.device)
        points = origin[:, None] + direction[:, None] * along[:, None]
        angles = (points[..., None] * self.powers).flatten(-2)
        x = torch.cat([points, angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        shade, dense = self.head(x).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.softplus(dense[..., 0]) * 0.05)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((alpha * left)[..., None] * shade.sigmoid()).sum(1), color)


class Physics(nn.Module):
    """A network whose derivatives enter its loss, as in physics-informed learning."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        sizes = [2, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, 1)

    def forward(self, place: Tensor) -> Tensor:
        place = place.requires_grad_()
        x = place
        for layer in self.layers:
            x = torch.tanh(layer(x))
        field = self.head(x)
        (slope,) = torch.autograd.grad(field.sum(), place, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), place, create_graph=True)
        return (slope[:, 1] + field[:, 0] * slope[:, 0] - 0.01 * bend[:, 0]).square().mean()


class Pairs(nn.Module):
    """A contrastive and a triplet loss over all pairs of two views of each row."""

    def __init__(self, *, width: int, depth: int, code: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth)]
        )
        self.head = nn.Linear(width, code)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        codes = self.head(self.body(torch.cat([one, other])))
        unit = F.normalize(codes.float(), dim=-1)
        scores = unit @ unit.t() / 0.1
        scores = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool, device=scores.device), -torch.inf)
        partner = torch.arange(len(scores), device=scores.device).roll(len(one))
        apart = torch.cdist(unit, unit)
        near = apart.gather(1, partner[:, None])
        return F.cross_entropy(scores, partner) + F.relu(near - apart + 0.2).mean()


class _Triangle(nn.Module):
    """Updates of pairs of positions by their third sides, in einsum; attention along one axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.sides = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.after, self.out, self.gate = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.heads, self.all, self.bias = 4, nn.Linear(width, 3 * width), nn.Linear(width, 4, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm(z)
        a, b, gate_a, gate_b = self.sides(y).chunk(4, -1)
        third = torch.einsum("bikc,bjkc->bijc", a * gate_a.sigmoid(), b * gate_b.sigmoid())
        z = z + self.gate(y).sigmoid() * self.out(self.after(third))
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in self.all(z).chunk(3, -1))
        scores = torch.einsum("bijhd,bikhd->bihjk", q, k) + self.bias(z).permute(0, 3, 1, 2)[:, None]
        return z + torch.einsum("bihjk,bikhd->bijhd", scores.softmax(-1), v).flatten(-2)


class Triangles(nn.Module):
    """Updates of all pairs of positions, as in protein folding; predicts pair distances."""

    def __init__(self, *, width: int, depth: int, bins: int = 32) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, width), nn.Linear(width, bins)
        self.blocks = nn.ModuleList(_Triangle(width) for _ in range(depth))

    def forward(self, residues: Tensor, distance: Tensor) -> Tensor:
        z = self.enter(residues[:, :, None] + residues[:, None])
        for block in self.blocks:
            z = block(z)
        return F.cross_entropy(self.head(z).permute(0, 3, 1, 2), distance)


class Quantized(nn.Module):
    """A perceptron that trains with its weights and activations rounded to 8 bits."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scales", torch.full((width,), 0.01))
        self.register_buffer("zeros", torch.zeros(width, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            weight = torch.fake_quantize_per_channel_affine(layer.weight, self.scales, self.zeros, 0, -128, 127)
            y = torch.fake_quantize_per_tensor_affine(F.linear(y, weight, layer.bias), 0.05, 0, -128, 127)
            y = F.hardtanh(y, -4, 4)
        return F.huber_loss(y, x)


class Ensemble(nn.Module):
    """Several perceptrons with stacked weights, run by `vmap` of a functional call."""

    def __init__(self, *, width: int, members: int) -> None:
        super().__init__()
        base = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        ).to("meta")
        self.base, self.names = (
            (base,),
            [name for name, _ in base.named_parameters()],
        )  # a tuple hides the base's weights
        self.stacked = nn.ParameterList(
            nn.Parameter(torch.randn(members, *one.shape) * width**-0.5) for one in base.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        def one(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.base[0], weights, (x,))

        told = torch.vmap(one)(dict(zip(self.names, self.stacked, strict=True)))
        return F.mse_loss(told.squeeze(-1), x.mean(1).expand(len(told), -1))


class Flow(nn.Module):
    """A normalizing flow: invertible mixing with its log-determinant, and affine couplings."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.mixes = nn.ParameterList(nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0]) for _ in range(depth))
        half = width // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 4 * width), nn.SiLU(), nn.Linear(4 * width, 2 * half)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), device=x.device)
        for mix, net in zip(self.mixes, self.nets, strict=True):
            x = x @ mix.to(x.dtype)
            total = total + torch.linalg.slogdet(mix.float())[1]
            kept, changed = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([kept, changed * scale.exp() + shift], -1)
            total = total + scale.sum(-1)
        return (0.5 * x.float().square().sum(-1) - total).mean()
