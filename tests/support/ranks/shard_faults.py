"""Out-of-memory errors on one rank of `unified_fsdp`, and the undisturbed twin of such a fit."""

import os
from typing import Any

import lightning as L
import torch

from tests.support.lasting import Lasting
from tests.support.ranks.modules import TEXT


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


class Fails(L.Callback):
    """Raises an out-of-memory error on one rank, in a phase of a batch, after the step has done some work."""

    left = Lasting()

    def __init__(self, phase: str, *, on: int = 1, batch: int = 2, times: int = 1) -> None:
        self.phase, self.on, self.batch, self.seen, self.left = phase, on, batch, -1, times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if local_rank() != self.on or self.seen != self.batch:
            return
        last = module.blocks[-1]
        if self.phase == "forward":
            self._handle = last.register_forward_hook(lambda *_: self._fail())
        elif self.phase == "backward":
            self._handle = last.register_full_backward_hook(lambda *_: self._fail())
        elif self.phase == "gathering":
            self._before(torch, "empty")
        elif self.phase == "reduction":
            self._before(trainer.strategy._shards, "_take_rows")
        elif self.phase == "collective":
            self._in_collective(trainer.strategy._shards.collectives)
        elif self.phase == "optimizer step":
            self._before(trainer.optimizers[0], "_init_group")
        elif self.phase == "half written":
            self._before(torch, "_foreach_addcdiv_")
            self._before(torch, "_foreach_lerp_")

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if self.phase == "validation" and local_rank() == self.on and self.left and not trainer.sanity_checking:
            self._handle = module.blocks[-1].register_forward_hook(lambda *_: self._fail())

    def on_after_backward(self, trainer, module):
        self._fail_in("hook")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._fail_in("clipping")

    def _fail_in(self, phase: str) -> None:
        if self.phase == phase and local_rank() == self.on and self.seen == self.batch and self.left:
            self._fail()

    def _in_collective(self, collectives: Any) -> None:
        """Fail before the vote on the fifth collective: a gathering or a reduction whose buffers do not fit."""
        begin, calls = collectives.begin, []

        def failing(kind: str, sent: torch.Tensor) -> None:
            calls.append(kind)
            if len(calls) >= 5:
                self._fail()
            begin(kind, sent)

        collectives.begin = failing

    def _before(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def failing(*args, **kwargs):
            if self.left:
                self._fail()
            setattr(owner, name, call)
            return call(*args, **kwargs)

        setattr(owner, name, failing)

    def _fail(self) -> None:
        if not self.left:
            return
        self.left -= 1
        raise RuntimeError(TEXT)


class ShrinksAt(L.Callback):
    """The undisturbed twin of a fit that fails: from the same batch on, all ranks use the smaller size."""

    def __init__(self, limit: int, *, batch: int = 2) -> None:
        self.limit, self.batch, self.seen = limit, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = self.limit
