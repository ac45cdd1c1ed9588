"""Compiled modules are split, checkpointed, recovered, evaluated and saved as plain ones."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.compiled import compiled_parts
from lightning_unified.nn.recomputing import RecomputePolicy

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
WIDTH, CLASSES, ROWS = 8, 11, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Module(L.LightningModule):
    """Memory holds `room` rows."""

    def __init__(self, room=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss, self.room = Net(), functional.cross_entropy, room

    def training_step(self, batch, batch_idx):
        if self.room is not None and len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(TEXT)
        return self.loss(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(self.net(batch[0]).flatten(0, 1), batch[1].flatten()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def whole(module, compile_):
    module.net = compile_(module.net)


def in_place(module, compile_):
    module.net.compile(backend=compile_.keywords["backend"])


def blocks(module, compile_):
    for block in module.net.blocks:
        block.compile(backend=compile_.keywords["backend"])


def wrapped_blocks(module, compile_):
    for index, block in enumerate(module.net.blocks):
        module.net.blocks[index] = compile_(block)


def loss(module, compile_):
    module.loss = compile_(functional.cross_entropy)


KINDS = {kind.__name__: kind for kind in (whole, in_place, blocks, wrapped_blocks, loss)}


def loader():
    tokens = torch.randint(0, CLASSES, (2 * ROWS, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), batch_size=ROWS)


def fit(module, strategy, epochs=1, ckpt_path=None, events=()):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        strategy=strategy,
        callbacks=[*events],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def plain():
    """Weights and the validation loss after two epochs in plain Lightning, without compilation."""
    module = Module()
    trainer = fit(module, "auto", epochs=2)
    return [one.detach() for one in module.parameters()], trainer.callback_metrics["loss"]


def check(module, trainer, plain):
    weights, validation = plain
    for one, other in zip(module.parameters(), weights, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(trainer.callback_metrics["loss"], validation, atol=1e-5)


def compiled(kind, backend):
    torch.compiler.reset()
    module = Module(room=4)
    KINDS[kind](module, partial(torch.compile, backend=backend))
    return module


SLOW = [("blocks", "aot_eager"), ("whole", "aot_eager"), ("whole", "inductor"), ("blocks", "inductor"), ("in_place", "aot_eager"), ("wrapped_blocks", "aot_eager"), ("loss", "aot_eager")]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("blocks", "eager"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_compiled_module_trains_as_a_plain_one(kind, backend, plain, tmp_path):
    first = compiled(kind, backend)
    given = [dict(vars(one)) for one in first.net.modules()]
    strategy = UnifiedStrategy(budget="4GiB", recompute=True)
    saved = tmp_path / "last.ckpt"
    fit(first, strategy).save_checkpoint(saved)
    assert strategy.policy.recoveries == 1
    assert [dict(vars(one)) for one in first.net.modules()] == given

    second = compiled(kind, backend)
    trainer = fit(second, UnifiedStrategy(budget="4GiB", micro_batch_size=3), epochs=2, ckpt_path=saved)
    check(second, trainer, plain)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_the_memory_option_compiles_for_the_fit_only(what, plain, tmp_path):
    torch.compiler.reset()
    module = Module(room=4)
    strategy = UnifiedStrategy(budget="4GiB", compile=what, recompute=True)
    trainer = fit(module, strategy, epochs=2)
    check(module, trainer, plain)
    assert strategy.policy.recoveries == 1
    assert strategy.plan.reasons["compile"].startswith("as asked: ")
    assert not compiled_parts(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    names = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert not [name for name in names if "_orig_mod" in name]


class Keeps(L.Callback):
    """Lets compiled blocks keep a share of their activations, as a plan may choose."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.policy.recomputation.set(RecomputePolicy(blocks="all", kept=0.2), why="as in a test")


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["auto", 3])
def test_blocks_that_keep_a_share_train_as_plain_ones(rows, plain, tmp_path):
    torch.compiler.reset()
    options = {"budget": "4GiB", "compile": "blocks", "predict": False}
    first, strategy = Module(room=4), UnifiedStrategy(**options)
    saved = tmp_path / "last.ckpt"
    fit(first, strategy, events=[Keeps()]).save_checkpoint(saved)
    assert strategy.policy.recoveries == 1
    assert "keep 20 % of their activations" in strategy.plan.reasons["recompute"]
    assert not compiled_parts(first)

    second = Module()
    strategy = UnifiedStrategy(micro_batch_size=rows, **options)
    check(second, fit(second, strategy, epochs=2, ckpt_path=saved, events=[Keeps()]), plain)


def test_a_simulated_machine_refuses_to_compile():
    with pytest.raises(ConfigurationError, match='compile="blocks": on the simulated machine m2-16gb'):
        fit(Module(), UnifiedStrategy(simulate="m2-16gb", compile="blocks"))
