"""Networks over sequences beside plain language models.

Learned attention biases, speech with CTC, state spaces, grouped experts, recurrences and linear attention.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "AttendingCells", "BiasedTranslator", "GroupedExperts", "LinearAttention", "PackedText", "Speech", "StateSpace", "Tagger", "Waves",
]  # fmt: skip


class _Heads(nn.Module):
    """Attention whose scores get a learned bias for each distance of two positions."""

    def __init__(self, width: int, *, reach: int) -> None:
        super().__init__()
        self.heads, self.reach = width // 64, reach
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.bias = nn.Embedding(2 * reach + 1, self.heads)

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        places, others = (torch.arange(each.shape[1], device=x.device) for each in (x, memory))
        distance = (others[None] - places[:, None]).clamp(-self.reach, self.reach) + self.reach
        bias = self.bias(distance).permute(2, 0, 1)[None]
        if causal:
            bias = bias.masked_fill((others[None] > places[:, None])[None, None], -1e4)
        q = self.query(x).unflatten(-1, (self.heads, 64)).transpose(1, 2)
        k, v = (each.unflatten(-1, (self.heads, 64)).transpose(1, 2) for each in self.both(memory).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out(mixed.transpose(1, 2).flatten(2))


class _BiasedBlock(nn.Module):
    def __init__(self, width: int, *, crosses: bool, reach: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + crosses))
        self.own = _Heads(width, reach=reach)
        self.cross = _Heads(width, reach=reach) if crosses else None
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        given = self.norms[0](x)
        x = x + self.own(given, given, causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.dense(self.norms[1](x))


class BiasedTranslator(nn.Module):
    """Encoder and decoder with learned biases of relative positions, as in T5."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, reach: int = 64) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.encoder = nn.ModuleList(_BiasedBlock(width, crosses=False, reach=reach) for _ in range(depth))
        self.decoder = nn.ModuleList(_BiasedBlock(width, crosses=True, reach=reach) for _ in range(depth))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.table(source), self.table(target[:, :-1])
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), target[:, 1:].flatten())


class _Convolved(nn.Module):
    """The convolution of a conformer: gated, depth-wise along time, with batch norm."""

    def __init__(self, width: int, *, points: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.along = nn.Conv1d(width, width, points, padding=points // 2, groups=width)
        self.batch_norm, self.leave = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.enter(self.norm(x).transpose(1, 2)), dim=1)
        return self.leave(F.silu(self.batch_norm(self.along(y)))).transpose(1, 2)


class _Conformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(2)
        )
        self.norm, self.attention = (
            nn.LayerNorm(width),
            nn.MultiheadAttention(width, width // 64, dropout=0.1, batch_first=True),
        )
        self.convolved, self.last = _Convolved(width, points=15), nn.LayerNorm(width)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        given = self.norm(x)
        x = x + self.attention(given, given, given, key_padding_mask=padded, need_weights=False)[0]
        x = x + self.convolved(x)
        return self.last(x + 0.5 * self.after(x))


class Speech(nn.Module):
    """A conformer over spectrograms, with the loss of connectionist temporal classification."""

    def __init__(self, *, width: int, depth: int, bands: int = 80, letters: int = 64) -> None:
        super().__init__()
        self.shorten = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.enter, self.head = nn.Linear(8 * bands, width), nn.Linear(width, letters)
        self.blocks = nn.ModuleList(_Conformer(width) for _ in range(depth))

    def forward(self, sound: Tensor, lengths: Tensor, letters: Tensor, count: Tensor) -> Tensor:
        x = self.enter(self.shorten(sound[:, None]).transpose(1, 2).flatten(2))
        lengths = lengths // 4
        padded = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        for block in self.blocks:
            x = block(x, padded)
        return F.ctc_loss(
            self.head(x).log_softmax(-1).transpose(0, 1), letters, lengths, count, blank=0, zero_infinity=True
        )


class _Scan(nn.Module):
    """Selective state space: input decides the decay of the state and the intake."""

    def __init__(self, width: int, *, states: int, loops: bool) -> None:
        super().__init__()
        self.loops = loops
        self.norm, self.enter, self.leave = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width, width),
        )
        self.along = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)
        self.chosen, self.pace = nn.Linear(2 * width, 2 * states), nn.Linear(2 * width, 2 * width)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(2 * width, 1))
        self.skip = nn.Parameter(torch.ones(2 * width))

    def forward(self, given: Tensor) -> Tensor:
        x, gate = self.enter(self.norm(given)).chunk(2, -1)
        x = F.silu(self.along(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        into, out = self.chosen(x).chunk(2, -1)
        pace = F.softplus(self.pace(x))
        y = self._step_by_step(x, pace, into, out) if self.loops else self._at_once(x, pace, into, out)
        return given + self.leave((y + x * self.skip) * F.silu(gate))

    def _step_by_step(self, x: Tensor, pace: Tensor, into: Tensor, out: Tensor) -> Tensor:
        keeps = torch.exp(-pace[..., None] * self.decay.exp())
        takes = (pace * x)[..., None] * into[..., None, :]
        state, found = torch.zeros_like(takes[:, 0]), []
        for at in range(x.shape[1]):
            state = keeps[:, at] * state + takes[:, at]
            found.append((state * out[:, at, None]).sum(-1))
        return torch.stack(found, 1)

    def _at_once(self, x: Tensor, pace: Tensor, into: Tensor, out: Tensor) -> Tensor:
        logs = (-pace[..., None] * self.decay.exp()).cumsum(1).clamp_min(-20)
        takes = (pace * x)[..., None] * into[..., None, :]
        state = (takes * torch.exp(-logs)).cumsum(1) * torch.exp(logs)
        return torch.einsum("btws,bts->btw", state, out)


class StateSpace(nn.Module):
    """Language model of selective state spaces, as in Mamba; `loops` runs by position."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, states: int = 8, loops: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Scan(width, states=states, loops=loops) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.table.weight.t()).flatten(0, 1), tokens[:, 1:].flatten())


class _Grouped(nn.Module):
    """Two of several experts for each token, all experts in one grouped product."""

    def __init__(self, width: int, *, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.inner = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.out = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, given: Tensor) -> Tensor:
        tokens = self.norm(given).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        experts, order = chosen.flatten().sort()
        ends = torch.zeros(self.router.out_features, dtype=torch.int32, device=given.device)
        ends = ends.scatter_add(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(tokens[order // 2], self.inner, offs=ends).chunk(2, -1)
        done = F.grouped_mm(F.silu(gate) * up, self.out, offs=ends)
        done = done * weights.flatten()[order, None]
        return given + torch.zeros_like(tokens).index_add(0, order // 2, done.to(tokens.dtype)).view_as(given)


class GroupedExperts(nn.Module):
    """Language model of experts in grouped products, with convolutions in time between them."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, experts: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(_Grouped(width, experts=experts) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Waves(nn.Module):
    """Gated dilated causal convolutions, as in WaveNet; predicts the next of 256 levels."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, width), nn.Conv1d(width, 256, 1)
        self.dilations = [2 ** (at % 8) for at in range(depth)]
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=each) for each in self.dilations)
        self.mixed = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))

    def forward(self, levels: Tensor) -> Tensor:
        x, skipped = self.table(levels[:, :-1]).transpose(1, 2), 0
        for gated, mixed, dilation in zip(self.gated, self.mixed, self.dilations, strict=True):
            value, gate = gated(F.pad(x, (dilation, 0))).chunk(2, 1)
            rest, skip = mixed(torch.tanh(value) * torch.sigmoid(gate)).chunk(2, 1)
            x, skipped = x + rest, skipped + skip
        return F.cross_entropy(self.head(F.relu(skipped)), levels[:, 1:])


class Tagger(nn.Module):
    """A recurrence in both directions that gives each position a class."""

    def __init__(
        self, *, cell: str, vocabulary: int, width: int, depth: int, projects: int = 0, classes: int = 16
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        options = {"proj_size": projects} if projects else {}
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[cell]
        self.layers = kind(width, width, depth, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(2 * (projects or width), classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.layers(self.table(tokens))[0]).flatten(0, 1), tokens.flatten() % self.head.out_features
        )


class PackedText(nn.Module):
    """A GRU over packed texts of unequal length, and a class for each text."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, length: int, classes: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, classes)
        self.layers = nn.GRU(width, width, depth, batch_first=True)

    def forward(self, tokens: Tensor, padded: Tensor, label: Tensor) -> Tensor:
        lengths = (~padded).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(self.head(self.layers(packed)[1][-1]), label)


class AttendingCells(nn.Module):
    """A decoder of single GRU cells that attends to the encoded source at every step."""

    def __init__(self, *, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(2 * width, vocabulary)
        self.encoder, self.cell = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.table(source))
        state, seen, found = last[0], torch.zeros_like(last[0]), []
        for token in self.table(target[:, :-1]).unbind(1):
            state = self.cell(torch.cat([token, seen], -1), state)
            weights = torch.bmm(memory, state[:, :, None]).softmax(1)
            seen = (weights * memory).sum(1)
            found.append(torch.cat([state, seen], -1))
        return F.cross_entropy(self.head(torch.stack(found, 1)).flatten(0, 1), target[:, 1:].flatten())


class _Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 32)) for each in self.all(self.norm(x)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        mixed = torch.einsum("bthd,bthde->bthe", q, states) / (q * k.cumsum(1)).sum(-1, keepdim=True).sqrt()
        x = x + self.out(mixed.flatten(2) / math.sqrt(x.shape[1]))
        return x + self.dense(x)


class LinearAttention(nn.Module):
    """Causal linear attention by running sums, over vectors; predicts the next one."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Linear(width) for _ in range(depth))

    def forward(self, series: Tensor) -> Tensor:
        x = series[:, :-1]
        for block in self.blocks:
            x = block(x)
        return F.smooth_l1_loss(x, series[:, 1:])
