"""Hooks that a step registers once run once, in split and repeated steps too."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.step.recovery.undone_run import Undone

GENERATOR = torch.Generator().manual_seed(0)
ROWS = TensorDataset(torch.randn(32, 6, generator=GENERATOR), torch.randn(32, 2, generator=GENERATOR))
FAULTS = {"at": 0, "calls": 0}


class RunsOut(torch.autograd.Function):
    """Runs out of memory in one backward pass."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        FAULTS["calls"] += 1
        if FAULTS["calls"] == FAULTS["at"]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return gradient


def with_a_flag(module):
    if not module.is_hooked:
        module.net[0].register_forward_hook(lambda _, __, out: module.kept.append(out))
        module.is_hooked = True


def with_a_flag_of_a_submodule(module):
    if not hasattr(module.net, "is_hooked"):
        module.net[2].register_forward_pre_hook(lambda _, args, kwargs: module.kept.append(args[0]), with_kwargs=True)
        module.net.is_hooked = True


def with_a_handle(module):
    if module.handle is None:
        module.handle = module.net[0].register_forward_hook(lambda _, __, out: module.kept.append(out))


def with_a_list_of_handles(module):
    if not module.handles:
        module.handles += [one.register_forward_hook(lambda _, __, out: module.kept.append(out)) for one in module.net]


def on_a_parameter(module):
    if not module.is_hooked:
        module.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
        module.is_hooked = True


def in_every_step(module):
    if module.handle is not None:
        module.handle.remove()
    module.handle = module.net[0].register_forward_hook(lambda _, __, out: module.kept.append(out))


WAYS = [
    with_a_flag,
    with_a_flag_of_a_submodule,
    with_a_handle,
    with_a_list_of_handles,
    on_a_parameter,
    in_every_step,
]


class Collects(L.LightningModule):
    """Punishes the activations that hooks collect; its step registers the hooks."""

    def __init__(self, register):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.register, self.is_hooked, self.handle, self.handles, self.kept = register, False, None, [], []

    def training_step(self, batch, batch_idx):
        self.register(self)
        self.kept.clear()
        x, y = batch
        loss = F.mse_loss(self.net(RunsOut.apply(x.requires_grad_())), y)
        loss = loss + sum(kept.pow(2).mean() for kept in self.kept)
        self.kept.clear()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(register, strategy, *, at=0, callbacks=()):
    FAULTS.update(at=at, calls=0)
    torch.manual_seed(0)
    module = Collects(register)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(ROWS, batch_size=8))
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@pytest.mark.parametrize("register", WAYS)
def test_split_steps_register_hooks_once(register):
    split = train(register, UnifiedStrategy(micro_batch_size=3))

    assert split == pytest.approx(train(register, "auto"), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("register", WAYS)
def test_a_repeated_step_registers_hooks_once(register):
    repeated = train(register, UnifiedStrategy(predict=False), at=1)

    assert repeated == pytest.approx(train(register, "auto"), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("register", WAYS)
def test_a_step_that_is_tried_leaves_no_hook_behind(register):
    class Tries(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            before = hooks_of(module)
            with Undone(trainer):
                module.training_step([one.clone() for one in batch], batch_idx).backward()
            assert hooks_of(module) <= before

    train(register, UnifiedStrategy(), callbacks=[Tries()])


def hooks_of(module):
    owners = [*module.modules(), *module.parameters()]
    named = (getattr(one, name, None) for one in owners for name in ("_forward_hooks", "_backward_hooks"))
    return {number for hooks in named for number in hooks or ()}
