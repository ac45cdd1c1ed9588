"""A dry run that skips repeated blocks records the events of one that runs them all."""

from itertools import groupby

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run import DryRuns, StepSpec
from lightning_unified.planner.repeats import Replay, Twins
from tests.planner.dry_run.test_dry_runs import numbered
from tests.support.causal_lms import VOCABULARY, causal_lm, transformers
from tests.support.lanes import slow
from tests.support.zoo.dry_run import Transformer

SIZES = ((4, 1), (2, 2), (3, 2))


class Block(nn.Module):
    """A block with attention, dropout and a layer that is used twice."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide, self.narrow, self.dropout = nn.Linear(width, 16), nn.Linear(16, width), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


class Noisy(Block):
    def __init__(self):
        super().__init__(dropout=0.1)


class NoStream(Block):
    """Its input's gradient is a new storage."""

    def forward(self, x):
        return self.norm(super().forward(x))


class Adapted(Block):
    """Frozen, with a trained low-rank layer."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.low = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))

    def forward(self, x):
        return super().forward(x) + self.low(x)


class Reads(Block):
    def forward(self, x):
        y = super().forward(x)
        return y * y.mean().item()


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Stores(Block):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class Collects(Block):
    def __init__(self):
        super().__init__()
        self.all = []

    def forward(self, x):
        self.all.append(x.mean())
        return super().forward(x)


class Hooked(Block):
    def __init__(self):
        super().__init__()
        self.wide.register_forward_hook(lambda *_: None)


class Stack(Transformer):
    """A stack of blocks between a table and a head of its weight."""

    kind, frozen = Block, False

    def __init__(self, depth=7):
        super().__init__(width=8, layers=1, heads=1, length=6, vocabulary=20)
        self.blocks = nn.ModuleList(self.kind() for _ in range(depth))
        if self.frozen:
            self.tokens.requires_grad_(False)
            self.positions.requires_grad_(False)

    @staticmethod
    def batch(rows):
        return Transformer.batch(rows, length=6, vocabulary=20)


def stack_of(block, frozen=False):
    return type(block.__name__ + "Stack", (Stack,), {"kind": block, "frozen": frozen})


class Numbered(Block):
    """Runs another operation by its number, which its structure does not show."""

    number, others = 0, ()

    def forward(self, x):
        return super().forward(x.sin() if self.number in self.others else x)


class Pairs(Stack):
    """Every second block differs."""

    kind, others = Numbered, (1, 3, 5, 7)

    def __init__(self):
        super().__init__(depth=9)
        for number, block in enumerate(self.blocks):
            block.number, block.others = number, self.others


class OneDiffers(Pairs):
    """Blocks are equal but for one in the middle."""

    others = (5,)


class Custom(Stack):
    """A forward pass of its subclass."""

    def training_step(self, batch, batch_idx):
        x = self.through(self.tokens(batch["tokens"]))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch["labels"].flatten())


class Twice(Custom):
    def through(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class Between(Custom):
    def through(self, x):
        for block in self.blocks:
            x = block(x) * 1.5
        return x


class AllStates(Custom):
    """The sum of all blocks' outputs gets the loss."""

    def through(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return sum(states)


class Holds(Custom):
    """Keeps all blocks' outputs to the end of the forward pass."""

    def through(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states[-1]


class Skips(Custom):
    """Leaves out a block in every other call, as stochastic depth does."""

    calls = 0

    def through(self, x):
        self.calls += 1
        for index, block in enumerate(self.blocks):
            x = x if index == 4 and self.calls % 2 else block(x)
        return x


class Language(Stack):
    """A causal language model of transformers."""

    family, options, adapters, use_cache = "Qwen2", {"num_hidden_layers": 7}, False, False

    def __init__(self):
        super().__init__(depth=1)
        del self.blocks, self.tokens, self.positions, self.norm, self.head
        self.net = causal_lm(self.family, dtype=torch.float32, **self.options)
        if self.adapters:
            for name, parameter in self.net.named_parameters():
                parameter.requires_grad_("q_proj.weight" in name)

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch["tokens"], labels=batch["labels"], use_cache=self.use_cache).loss

    @staticmethod
    def batch(rows):
        return Transformer.batch(rows, length=6, vocabulary=VOCABULARY)


class ReadsCache(Language):
    """Reads what a block in the middle added to the cache."""

    def training_step(self, batch, batch_idx):
        found = self.net(input_ids=batch["tokens"], labels=batch["labels"], use_cache=True)
        return found.loss + found.past_key_values.layers[4].keys.square().mean()


class Prefixed(Language):
    """Begins with a cache of trained keys and values."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(7, 2, 1, 2, 3, 8))

    def training_step(self, batch, batch_idx):
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(self.prefix.expand(-1, -1, len(batch["tokens"]), -1, -1, -1)):
            cache.update(keys, values, layer)
        return self.net(input_ids=batch["tokens"], labels=batch["labels"], past_key_values=cache).loss


def language(family, **attributes):
    return type(family, (Language,), {"family": family, **attributes})


def both(kind, **setting):
    """Traces with repeated blocks skipped and with all blocks run, and the runs that were found."""
    module, recompute = kind(), setting.pop("recompute", None)
    step = StepSpec(module=module, batch=kind.batch(4), **setting)
    asked, found = [], {}
    for runs in (None, []):
        twins = Twins()
        twins.runs = runs
        kept = {(step.precision, step.attention): twins}
        dry_runs = DryRuns(step, recompute=recompute, twins=kept)
        asked.append([dry_runs.step(rows, num_micro_batches) for rows, num_micro_batches in SIZES])
        found[runs is None] = twins.runs
    return *asked, found[True]


def together(trace):
    """The trace, numbered; what ends together is sorted, as nothing lies between that could see its order."""
    events, *others = numbered(trace)
    found = []
    for _, group in groupby(events, key=lambda event: isinstance(event, int)):
        alike = list(group)
        found += sorted(alike) if isinstance(alike[0], int) else alike
    return found, *others


MPS, CUDA = {"backend": "mps", "precision": "bf16-mixed"}, {"backend": "cuda", "precision": "bf16-mixed"}


ALL, KEPT = {"recompute": True}, {"recompute": RecomputePolicy(blocks="all", keep_attention=True)}


SKIPPED = [
    slow(Stack, {}),
    slow(Stack, CUDA),
    slow(Stack, {**MPS, **ALL}),
    slow(Stack, {**CUDA, **KEPT}),
    slow(Stack, {"precision": "bf16-true"}),
    slow(stack_of(Noisy), {**CUDA, **ALL}),
    slow(stack_of(NoStream), MPS),
    slow(stack_of(Adapted, frozen=True), MPS),
    slow(stack_of(Adapted), {**CUDA, **ALL}),
    slow(Holds, {}),
    slow(language("Qwen2"), CUDA),
    slow(language("Qwen2", adapters=True), {**MPS, **ALL}),
    slow(language("Llama"), {}),
    slow(language("GPT2", options={"n_layer": 7}), MPS),
    (language("Qwen3", use_cache=True), CUDA),
    slow(language("Llama", use_cache=True), {**MPS, **ALL}),
    slow(language("GPT2", options={"n_layer": 7}, use_cache=True), {}),
]


@pytest.mark.parametrize(("kind", "setting"), SKIPPED)
def test_traces_equal_those_of_all_blocks_event_for_event(kind, setting):
    skipped, full, runs = both(kind, **setting)

    assert [(run.first, run.end) for run in runs] == [(0, 7)]
    assert list(map(together, skipped)) == list(map(together, full))


def shared(twins):
    """Traces on two fake copies that share the repeated blocks, one of them with a chunked loss."""
    module, copies, setting = language("Qwen2")(), {}, {"precision": "bf16-true", "backend": "mps"}
    found = []
    for chunk, recompute, size in ((None, False, (4, 1)), (8, True, (4, 1)), (8, False, (3, 2))):
        step = StepSpec(module=module, batch=module.batch(4), loss_chunk=chunk, **setting)
        dry_runs = DryRuns(
            step, recompute=recompute, fake_copies=copies, twins={(step.precision, step.attention): twins}
        )
        found.append(numbered(dry_runs.step(*size)))
    return found


@pytest.mark.slow
def test_a_second_fake_copy_keeps_the_order_in_which_weights_began_to_live():
    full = Twins()
    full.give_up()

    assert shared(Twins()) == shared(full)


TRACED = [
    slow(stack_of(Reads), {}),
    slow(stack_of(Counts), {}),
    slow(stack_of(Stores), MPS),
    slow(stack_of(Collects), {}),
    slow(stack_of(Hooked), ALL),
    slow(Pairs, {}),
    slow(OneDiffers, {}),
    slow(Twice, CUDA),
    (Between, {}),
    slow(AllStates, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting"), TRACED)
def test_blocks_that_differ_or_change_state_are_all_traced(kind, setting):
    skipped, full, runs = both(kind, **setting)

    assert runs == []
    assert list(map(numbered, skipped)) == list(map(numbered, full))


@pytest.mark.parametrize(
    "kind",
    [slow(Skips), slow(language("Gemma2")), slow(language("Gemma2", use_cache=True)), ReadsCache, slow(Prefixed)],
)
def test_blocks_called_unlike_their_twins_give_the_trace_of_all_blocks(kind):
    skipped, full, _ = both(kind)

    assert list(map(numbered, skipped)) == list(map(numbered, full))


@pytest.mark.parametrize(("kind", "skipped"), [(language("Qwen3", use_cache=True), 3 * 3), slow(Prefixed, 0)])
def test_blocks_that_fill_an_empty_cache_are_skipped(kind, skipped, monkeypatch):
    calls, skip = [], Replay._skip
    monkeypatch.setattr(Replay, "_skip", lambda *asked: calls.append(None) or skip(*asked))
    dry_runs = DryRuns(StepSpec(module=kind(), batch=kind.batch(4)))
    for size in ((4, 1), (2, 2)):
        dry_runs.step(*size)

    assert len(calls) == skipped


def deep(kind):
    return type(f"Deep{kind.__name__}", (kind,), {"__init__": lambda self: kind.__init__(self, depth=11)})


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (deep(Stack), MPS),
        slow(deep(Stack), CUDA),
        slow(deep(stack_of(Noisy)), CUDA),
        slow(deep(stack_of(Adapted)), MPS),
        slow(language("Qwen3", options={"num_hidden_layers": 11}), CUDA),
        slow(language("Llama", options={"num_hidden_layers": 11}, use_cache=True, adapters=True), MPS),
    ],
)
@pytest.mark.parametrize("keep_attention", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputed_blocks_are_skipped_and_those_that_follow_them(kind, setting, keep_attention, monkeypatch):
    blocks, skip = [], Replay._skip
    monkeypatch.setattr(Replay, "_skip", lambda *asked: blocks.append(asked[2]) or skip(*asked))
    step, none = StepSpec(module=kind(), batch=kind.batch(4), **setting), Twins()
    none.runs = []
    policy, traced = RecomputePolicy(blocks=5, keep_attention=keep_attention), []
    for known in ({}, {(step.precision, step.attention): none}):
        shared = {"twins": known, "fake_copies": {}}
        DryRuns(step, recompute=False, **shared).step(4)  # learns the run
        blocks.clear()
        dry_runs = DryRuns(step, recompute=policy, **shared)
        traced.append(([dry_runs.step(*size) for size in SIZES], set(blocks)))
    (skipped, names), (full, others) = traced

    assert list(map(together, skipped)) == list(map(together, full))
    assert (names, others) == ({3, 8, 9}, set())
