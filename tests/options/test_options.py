"""Recomputed blocks and loss chunks as memory options, without a Trainer.

Training is the same, and everything is undone.
"""

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import (
    AppliedOptions,
    CheckpointedBlocks,
    LossChunk,
    recompute_policies,
)
from lightning_unified.options.activation_checkpointing import ActivationCheckpointing
from lightning_unified.options.loss_chunk import chunk_choices, chunk_of

FUSED = {"Adam": Adam, "AdamW": AdamW, "SGD": lambda p, **k: SGD(p, 0.1, momentum=0.9, **k), "Adagrad": Adagrad}
ALL, NONE = RecomputePolicy(blocks="all"), RecomputePolicy(blocks=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.4)
        # attributes nearer to the block count first runs only
        self._counted = SimpleNamespace(by=SimpleNamespace(runs=0))

    @property
    def runs(self):
        return self._counted.by.runs

    def forward(self, x):
        self._counted.by.runs += 1
        return x + self.drop(self.linear(x)).relu()


class Deep(L.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def training_step(self, batch, batch_idx=0):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


class Switch(Deep):
    recompute = False


class Both(Switch):
    def recompute_blocks(self):
        return list(self.layers)


def deep(kind=Deep):
    torch.manual_seed(0)
    return kind()


def gradients(module):
    torch.manual_seed(1)
    module.zero_grad()
    module.training_step(torch.randn(3, 6)).backward()
    return [parameter.grad for parameter in module.parameters()]


def stood_in(module):
    return ["forward" in vars(layer) for layer in module.layers]


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (NONE, [1, 1, 1, 1]),
        (RecomputePolicy(blocks=1), [2, 1, 1, 1]),
        (RecomputePolicy(blocks=3, keep_attention=True), [2, 2, 2, 1]),
        (ALL, [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_the_first_blocks_run_twice_and_gradients_are_equal_bit_for_bit(policy, runs):
    module = deep()
    memory_option = CheckpointedBlocks(module, policy)
    again = gradients(module)
    memory_option.undo()
    memory_option.undo()

    assert [layer.runs for layer in module.layers] == runs
    assert all(torch.equal(a, b) for a, b in zip(gradients(deep()), again, strict=True))
    assert stood_in(module) == [False] * 4


def test_a_copy_of_a_module_with_a_memory_option_pulled_has_none():
    module = deep()
    CheckpointedBlocks(module, ALL)
    twin = copy.deepcopy(module)
    gradients(twin)

    assert [layer.runs for layer in twin.layers] == [1] * 4


def test_more_blocks_than_there_are_is_all():
    memory_option = CheckpointedBlocks(deep(), RecomputePolicy(blocks=9))

    assert (memory_option.policy, memory_option.how) == (ALL, "4 blocks of layers (Block), detected")


def test_some_blocks_are_shown_as_some():
    assert CheckpointedBlocks(deep(), RecomputePolicy(blocks=2, keep_attention=True)).how == (
        "the first 2 of 4 blocks of layers (Block), detected, attention kept"
    )


def test_a_switch_means_all_or_none_and_is_put_back():
    module = deep(Switch)
    memory_option = CheckpointedBlocks(module, ALL)
    assert module.recompute is True
    memory_option.undo()

    assert module.recompute is False
    assert recompute_policies(module) == (NONE, ALL)
    with pytest.raises(ConfigurationError, match=r"Switch recomputes by its own `recompute`, .* not 2 blocks\. "):
        CheckpointedBlocks(module, RecomputePolicy(blocks=2))


def test_a_module_with_a_switch_that_names_its_blocks_can_recompute_some():
    module = deep(Both)
    module.recompute = True
    memory_option = CheckpointedBlocks(module, RecomputePolicy(blocks=2))
    assert (module.recompute, stood_in(module)) == (False, [True, True, False, False])
    memory_option.undo()

    assert (module.recompute, stood_in(module)) == (True, [False] * 4)


def test_policies_go_from_none_to_all_with_and_without_attention():
    assert [str(policy) for policy in recompute_policies(deep())] == [
        "none",
        "1 of 4 blocks, attention kept",
        "1 of 4 blocks",
        "2 of 4 blocks, attention kept",
        "2 of 4 blocks",
        "3 of 4 blocks, attention kept",
        "3 of 4 blocks",
        "all blocks, attention kept",
        "all blocks",
    ]


def test_a_module_without_blocks_offers_none():
    assert recompute_policies(L.LightningModule()) == (NONE,)


def test_recomputation_goes_from_some_blocks_to_all_and_ends_as_it_began():
    module, recomputation = deep(), ActivationCheckpointing("auto")
    recomputation.begin(module)
    assert recomputation.on is None
    recomputation.set(RecomputePolicy(blocks=2), why="as planned")
    assert (stood_in(module), recomputation.on, recomputation.everything) == ([True, True, False, False], True, False)
    assert recomputation.reason == "as planned: the first 2 of 4 blocks of layers (Block), detected"

    assert recomputation.more("because memory ran out")
    assert (stood_in(module), recomputation.everything) == ([True] * 4, True)
    assert recomputation.reason == "because memory ran out: 4 blocks of layers (Block), detected"
    assert not recomputation.more("again")

    gradients(module)
    assert [layer.runs for layer in module.layers] == [2] * 4
    recomputation.end()
    assert stood_in(module) == [False] * 4


def test_saved_attention_outputs_are_given_up_for_want_of_memory():
    recomputation = ActivationCheckpointing("auto")
    recomputation.begin(deep())
    recomputation.set(RecomputePolicy(blocks="all", keep_attention=True), why="as planned")

    assert recomputation.more("because memory ran out")
    assert recomputation.policy == ALL


@pytest.mark.parametrize(("asked", "given"), [(True, NONE), (False, ALL), (False, RecomputePolicy(blocks=2))])
def test_what_was_asked_for_is_not_planned_otherwise(asked, given):
    recomputation = ActivationCheckpointing(asked)
    recomputation.begin(deep())

    with pytest.raises(
        ConfigurationError, match=rf"recompute={given} for Deep: it can be {'all blocks' if asked else 'none'}\."
    ):
        recomputation.set(given, why="as planned")


def test_a_switch_that_the_user_turned_on_stays_on():
    module, recomputation = deep(Both), ActivationCheckpointing("auto")
    module.recompute = True
    recomputation.begin(module)

    assert recomputation.choices() == (ALL,)


class Stranger(Deep):
    """Sets attributes of its own, which have the names of memory options."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


class OddRecompute(Deep):
    recompute = torch.ones(2)


@pytest.mark.parametrize("make", [OddRecompute, lambda: Stranger(recompute=False), lambda: Stranger(recompute=7)])
def test_a_strangers_recompute_is_neither_read_nor_set(make):
    module, recomputation = make(), ActivationCheckpointing(True)
    before = module.recompute
    recomputation.begin(module)
    assert module.recompute is before and stood_in(module) == [True] * 4
    recomputation.end()
    ActivationCheckpointing("auto").begin(module)

    assert module.recompute is before


def test_a_switch_that_is_set_is_said(caplog):
    caplog.set_level("INFO", logger="lightning_unified")
    ActivationCheckpointing(True).begin(Switch())

    assert "Switch.recompute is set to True, as asked." in caplog.text


class OddChunk(Deep):
    loss_chunk_rows = "all"


@pytest.mark.parametrize("make", [lambda: Stranger(loss_chunk_rows=7), OddChunk])
def test_a_strangers_loss_chunk_rows_is_neither_read_nor_set(make):
    module = make()
    before = module.loss_chunk_rows

    assert chunk_choices(module) == (None,) and chunk_of(module) is None
    with pytest.raises(
        ConfigurationError, match=r"loss_chunk=64: .* has no attribute loss_chunk_rows, by which a class says"
    ):
        LossChunk(module, 64)
    assert module.loss_chunk_rows is before


class Chunked(Deep):
    loss_chunk_rows = None


def test_a_chunk_is_set_and_undone():
    module = Chunked()
    memory_options = AppliedOptions()
    memory_options.begin(module, [])
    memory_options.set_loss_chunk(1024, why="as planned")
    assert (module.loss_chunk_rows, memory_options.loss_chunk) == (1024, 1024)
    memory_options.set_loss_chunk(128, why="as planned")
    assert memory_options.reasons == {"loss_chunk": "128 rows, as planned"}
    memory_options.end()

    assert module.loss_chunk_rows is None and "loss_chunk_rows" not in vars(module)
    assert memory_options.reasons == {}


def test_a_chunk_that_the_user_set_is_kept_and_alone_to_choose():
    module = Chunked()
    module.loss_chunk_rows = 64
    memory_options = AppliedOptions()
    memory_options.begin(module, [])
    assert memory_options.chunk_choices() == (64,)
    LossChunk(module, 8).undo()

    assert module.loss_chunk_rows == 64


def test_a_module_without_chunks_offers_none_and_is_refused_one():
    memory_options = AppliedOptions()
    memory_options.begin(deep(), [])

    assert memory_options.chunk_choices() == (None,)
    with pytest.raises(ConfigurationError, match=r"loss_chunk=8: Deep has no attribute loss_chunk_rows"):
        LossChunk(deep(), 8)
    with pytest.raises(ConfigurationError, match=r"loss_chunk=0: give a count of rows, 1 or more, or None"):
        LossChunk(Chunked(), 0)
