"""Fits that run out of memory at a chosen point, and the undisturbed ones."""

import random
from functools import lru_cache

import lightning as L
import numpy as np
import torch
from torch import nn

from lightning_unified import UnifiedStrategy
from tests.support.lasting import Lasting
from tests.support.modules.plain import MLP, fit

TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
BATCH = 4  # the batch that fails, counted over both epochs of three: the second of the second epoch


class Stateful(MLP):
    """Dropout draws numbers, and BatchNorm moves buffers.

    Both must be as if the failed attempt had not happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.Linear(16, 4))


class Fails(L.Callback):
    """Raises an out-of-memory error once, in a phase of a batch, after real work."""

    raised = Lasting()

    def __init__(self, phase: str, batch: int = BATCH) -> None:
        self.phase, self.batch, self.seen = phase, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen != self.batch:
            return
        layer = module.net[-1] if hasattr(module, "net") else module.head
        if self.phase == "forward":
            handle = layer.register_forward_hook(lambda *_: self._raise(handle))
        elif self.phase == "backward":
            handle = layer.weight.register_hook(lambda *_: self._raise(handle))
        elif self.phase == "optimizer.step":
            optimizer = trainer.optimizers[0]
            create_state = optimizer._init_group
            optimizer._init_group = lambda *args, **kwargs: self._in_step(create_state, *args, **kwargs)

    def _in_step(self, create_state, *args, **kwargs):
        """Torch's optimizers create their state here, before they write any weight."""
        result = create_state(*args, **kwargs)
        if not self.raised:
            self._raise(None)
        return result

    def _raise(self, handle):
        if handle is not None:
            handle.remove()
        self.raised += 1
        raise RuntimeError(TEXT)


class ShrinksAt(L.Callback):
    """The undisturbed twin: uses the smaller size from the same batch on."""

    def __init__(self, limit: int, batch: int = BATCH) -> None:
        self.limit, self.batch, self.seen = limit, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = self.limit


def run(kind, *callbacks, window=1, clip=None, **strategy):
    torch.manual_seed(0)
    module = kind().double()
    seen, trainer = fit(
        module,
        module.loader(),
        strategy=UnifiedStrategy(batch_norm="micro", **strategy),
        callbacks=list(callbacks),
        accumulate_grad_batches=window,
        gradient_clip_val=clip,
    )
    return module, seen, trainer


@lru_cache(maxsize=32)
def undisturbed(kind, limit, batch=BATCH, **options):
    """Return the result of a run that uses the smaller size from `batch` on.

    It is the same for every way to fail there.
    """
    random.seed(0)
    np.random.seed(0)
    return run(kind, ShrinksAt(limit, batch), **options)
