"""Compiled modules in a dry run: tensors saved by their graphs; functions without a module."""

from functools import partial
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend as get_compiler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_unified import predict
from lightning_unified.cost_model.trace.trace import Take
from lightning_unified.errors import DryRunError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import CheckpointedBlocks, Compilation
from lightning_unified.planner.dry_run import DryRun, StepSpec
from tests.support.lanes import first_cells

WIDTH, CLASSES, LENGTH, ROWS = 32, 2048, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(functional.linear(hidden, self.table.weight).flatten(0, 1), tokens.flatten())


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batch():
    return {"x": torch.zeros(ROWS, LENGTH, dtype=torch.long)}


def kept_bytes(module, recompute=None):
    trace = DryRun(StepSpec(module=module, batch=batch()), recompute=recompute).run(ROWS)
    of_step = ("activations", "logits")
    return sum(one.bytes for one in trace.events if isinstance(one, Take) and one.category in of_step)


def really_kept_bytes(module):
    """Return the bytes that a real forward pass saves, without weights and batch."""
    torch.compiler.reset()
    given, own = batch(), {one.untyped_storage().data_ptr() for one in module.parameters()}
    own.add(given["x"].untyped_storage().data_ptr())
    module.training_step(given, 0).backward()  # compiles
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module.training_step(given, 0)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
def test_a_compiled_block_keeps_what_its_partitioned_graph_saves():
    module = Module()
    for block in module.net.blocks:
        block.compile(backend="aot_eager_decomp_partition")

    assert kept_bytes(module) == pytest.approx(really_kept_bytes(module), abs=64)  # the loss keeps a scalar or two


@first_cells(1, "share", [0.4, 0.0])
def test_a_compiled_block_that_keeps_a_share_is_planned_as_it_runs(share):
    module, policy, compilation = Module(), RecomputePolicy(blocks="all", kept=share), Compilation("blocks")
    with mock.patch("torch._inductor.compile_fx.compile_fx", get_compiler("aot_eager_decomp_partition")):
        compilation.begin(module)
        planned, whole = kept_bytes(module, recompute=policy), kept_bytes(module)
        blocks = CheckpointedBlocks(module, policy)
        really = really_kept_bytes(module)
        blocks.undo()
    compilation.end()

    assert planned == pytest.approx(
        really, rel=0.005
    )  # a graph for any number of rows may save row statistics that others do not
    assert planned < 0.75 * whole


class Written(Block):
    """It reads a buffer and then writes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(LENGTH, 4 * WIDTH))

    def forward(self, x):
        hidden = functional.gelu(self.up(self.norm(x)) * self.scale.clone())
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x + self.down(hidden)


@pytest.mark.slow
@first_cells(1, "share", [None, 0.0])
def test_a_compiled_block_that_writes_a_buffer_is_planned_as_it_runs(share):
    module, compilation = Module(), Compilation("blocks")
    module.net.blocks = nn.ModuleList(Written() for _ in range(3))
    policy = RecomputePolicy(blocks="all", kept=share) if share is not None else RecomputePolicy(blocks=0)
    compilation.begin(module)
    planned, blocks = kept_bytes(module, recompute=policy), CheckpointedBlocks(module, policy)
    really = really_kept_bytes(module)
    blocks.undo()
    compilation.end()

    assert planned == pytest.approx(really, rel=0.005)


def test_operations_without_values_to_fill_are_planned():
    class Draws(Block):
        def forward(self, x):
            return super().forward(x * torch.poisson(torch.ones_like(x)))

    module, compilation = Module(), Compilation("blocks")
    module.net.blocks = nn.ModuleList(Draws() for _ in range(3))
    compilation.begin(module)
    assert kept_bytes(module) > 0
    compilation.end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "whole"])
def test_a_checkpointed_compiled_block_keeps_its_input_only(kind):
    module = Module()
    for part in module.net.blocks if kind == "blocks" else [module.net]:
        part.compile(backend="aot_eager_decomp_partition")
    saved = kept_bytes(module) - kept_bytes(module, recompute=True)

    inside = ROWS * LENGTH * 4 * WIDTH * 4  # the widest tensor of a block, of which a compiled block keeps two at most
    assert 3 * inside <= saved <= 9 * inside


@pytest.mark.slow
def test_a_compiled_module_makes_no_tensor_that_its_kernels_fuse():
    eager, compiled = Module(), Module()
    compiled.net = torch.compile(compiled.net)
    logits = ROWS * LENGTH * CLASSES * 4

    before, now = (predict(one, batch(), device="cuda").peak_bytes for one in (eager, compiled))
    assert before - now > 1.5 * logits  # logits, log-probabilities and their gradient become one tensor


class Encoder(Net):
    """Its blocks are torch's own layers, or sequences of the user's."""

    def __init__(self, kind):
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        block = layer if kind == "torch's layers" else lambda: nn.Sequential(Block(), nn.GELU(), Block())
        self.blocks = nn.ModuleList(block() for _ in range(2))


@first_cells(1, "kind", ["torch's layers", "sequences"])
@first_cells(1, "by", ["compile in place", "torch.compile", "strategy"])
def test_torchs_own_modules_are_planned_as_the_compiler_runs_them(kind, by):
    module = Module()
    module.net = Encoder(kind)
    blocks, backend = module.net.blocks, "aot_eager_decomp_partition"
    compilation = Compilation("blocks")
    if by == "strategy":
        with mock.patch("lightning_unified.options.compilation.Compiler", return_value=backend):
            compilation.begin(module)
    for index, block in enumerate(blocks):
        if by == "compile in place":
            block.compile(backend=backend)
        elif by == "torch.compile":
            blocks[index] = torch.compile(block, backend=backend)

    assert kept_bytes(module) == pytest.approx(really_kept_bytes(module), abs=64)
    compilation.end()


def test_a_compiled_function_is_planned_where_a_module_holds_it():
    global_loss = torch.compile(functional.cross_entropy)

    class Held(Module):
        def __init__(self):
            super().__init__()
            self.loss = torch.compile(functional.cross_entropy)

        def training_step(self, batch, batch_idx):
            hidden = self.net.table(batch["x"])
            logits = functional.linear(hidden, self.net.table.weight)
            return self.loss(logits.flatten(0, 1), batch["x"].flatten())

    class Loose(Held):
        def training_step(self, batch, batch_idx):
            self.loss = global_loss
            return super().training_step(batch, batch_idx)

    class Eager(Held):
        def training_step(self, batch, batch_idx):
            self.loss = functional.cross_entropy
            return super().training_step(batch, batch_idx)

    held, eager = (predict(kind(), batch(), device="cuda").peak_bytes for kind in (Held, Eager))
    assert eager - held > 0.5 * ROWS * LENGTH * CLASSES * 4
    with pytest.raises(DryRunError, match="calls a function that torch"):
        predict(Loose(), batch(), device="cuda")
