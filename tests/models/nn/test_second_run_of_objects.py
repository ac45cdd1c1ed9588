"""The second run of a block leaves objects, closures and logs as after one run."""

import copy
import functools
from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.nn.recomputing import Recomputing

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x).sin()


class Meter:
    """A mean of numbers and their number, as in many training scripts."""

    def __init__(self):
        self.count, self.values = 0, []

    def update(self, value):
        self.count += 1
        self.values.append(value)


class Measured(Block):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def forward(self, x):
        y = super().forward(x) / (1 + self.meter.count)
        self.meter.update(float(y.detach().mean()))
        return y


class Collecting(Block):
    """Leaves a loss in an object that all blocks share, as mixtures of experts do."""

    losses: SimpleNamespace

    def forward(self, x):
        y = super().forward(x)
        self.losses.all = [*self.losses.all, y.square().mean()]
        return y


@dataclass
class State:
    x: torch.Tensor
    depth: int = 0


class Moving(Block):
    """Writes the object that it is given."""

    def forward(self, state):
        state.x = super().forward(state.x) / (1 + state.depth)
        state.depth += 1


def measured(blocks, x):
    for block in blocks:
        x = block(x)
    return x.square().mean(), lambda: [(block.meter.count, block.meter.values) for block in blocks]


def collecting(blocks, x):
    shared = SimpleNamespace(all=[])
    for block in blocks:
        block.losses = shared
        x = block(x)
    losses, shared.all = shared.all, []
    return sum(losses, x.mean()), lambda: shared.all


def moving(blocks, x):
    state = State(x)
    for block in blocks:
        block(state)
    return state.x.square().mean(), lambda: state.depth


CASES = {"meter": (Measured, measured), "collector": (Collecting, collecting), "argument": (Moving, moving)}


@pytest.mark.parametrize(("kind", "step"), CASES.values(), ids=CASES)
def test_objects_of_a_block_are_written_once_and_gradients_are_equal(kind, step):
    torch.manual_seed(0)
    plain, x = [kind() for _ in range(3)], torch.randn(4, WIDTH)
    again = copy.deepcopy(plain)
    found = []
    for blocks, recomputed in ((plain, []), (again, again)):
        with Recomputing(recomputed):
            for _ in range(2):
                loss, state = step(blocks, x)
                loss.backward()
        found.append(([one.linear.weight.grad for one in blocks], state()))

    (expected, state), (gradients, state_again) = found
    assert all(map(torch.equal, expected, gradients))
    assert state == state_again


class Watching(L.Callback):
    """Keeps statistics of a block's inside by hooks of every kind."""

    def __init__(self, blocks):
        self.means, self.inputs, count = [], {}, 0

        def counts(*_):
            nonlocal count
            count += 1

        self.count = lambda: count
        for block in blocks:
            block.linear.register_forward_hook(lambda _, args, y: self.means.append(float(y.detach().mean())))
            block.linear.register_forward_hook(counts)
            block.linear.register_forward_pre_hook(self.keep)
            block.linear.register_forward_hook(functools.partial(self.keep_as, "output"))

    def keep(self, _, args):
        self.inputs.setdefault("input", []).append(args[0].detach())

    def keep_as(self, name, *_):
        self.inputs.setdefault(name, []).append(None)


def test_hooks_inside_a_block_write_their_closures_and_objects_once():
    blocks = [Block() for _ in range(2)]
    watching = Watching(blocks)
    with Recomputing(blocks):
        y = blocks[1](blocks[0](torch.randn(4, WIDTH)))
        before = list(watching.means)
        y.sum().backward()

    assert watching.means == before
    assert (len(before), watching.count()) == (2, 2)
    assert {name: len(kept) for name, kept in watching.inputs.items()} == {"input": 2, "output": 2}


def test_a_hook_that_counts_by_an_attribute_of_the_module_around_counts_once():
    net = nn.Module()
    net.layers, net.count, net.inside = nn.ModuleList(Block() for _ in range(2)), 0, []

    def counts(*_):
        net.count += 1
        net.inside.append(net.count)

    for block in net.layers:
        block.linear.register_forward_hook(counts)
    with Recomputing(net.layers):
        net.layers[1](net.layers[0](torch.randn(4, WIDTH))).sum().backward()

    assert (net.count, net.inside) == (2, [1, 2])


def test_a_checkpoint_of_the_users_around_a_block_works_from_the_first_call_on():
    block, x = Block(), torch.randn(4, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(block(x).square().sum(), x)
    with Recomputing([block]):
        for _ in range(5):
            y = checkpoint(lambda one: block(one.double().float()), x, use_reentrant=False)
            assert torch.equal(*expected, *torch.autograd.grad(y.square().sum(), x))


class Logging(L.LightningModule):
    """Logs inside its blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        for layer in self.layers:
            layer.linear.register_forward_hook(self.logs)

    def logs(self, _, args, y):
        self.log("last", y.detach().mean())
        self.log("rows", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum")

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def logged(**options):
    torch.manual_seed(0)
    module = Logging()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(8, WIDTH), batch_size=4))
    assert "log" not in vars(module)
    return trainer.callback_metrics


def test_logs_inside_a_block_are_those_of_its_first_run():
    plain, again = logged(), logged(strategy=UnifiedStrategy(recompute=True))

    assert plain == again
    assert plain["rows"] == 2 * 3 * 4
