"""Memory may run out at any operation that makes a tensor, and nothing is lost.

Operations that record and undo a step are among them.
"""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_unified.step.recovery.oom import insist
from tests.step.recovery.test_recovery import BATCH, TEXT
from tests.support.lanes import crossed, first_cells
from tests.support.lasting import Lasting
from tests.support.modules.plain import MLP, weights
from tests.support.runs.recovering import ShrinksAt, run


class Operations(TorchDispatchMode):
    """Fails at the given ones of the operations that make a tensor, counted from 1."""

    count = Lasting()

    def __init__(self, *fails):
        super().__init__()
        self.fails = set(fails)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(result.alias_info is None for result in func._schema.returns):
            self.count += 1
            if self.count in self.fails:
                raise RuntimeError(TEXT)
        return func(*args, **(kwargs or {}))


class FailsAt(Callback):
    """Lets memory run out at the n-th operation of a batch, and at `more` operations after it."""

    def __init__(self, nth, more=0):
        self.mode, self.seen = Operations(*range(nth, nth + more + 1)), -1

    def on_train_batch_start(self, *_):
        self.seen += 1
        if self.seen == BATCH:
            self.mode.__enter__()

    def on_train_batch_end(self, *_):
        if self.seen == BATCH:
            self.mode.__exit__(None, None, None)


@first_cells(2, ("nth", "more"), crossed([1, 5, 20, 60, 100], [0, 1], fast=[(1, 0), (20, 1), (60, 0), (100, 1)]))
def test_memory_that_runs_out_at_any_operation_leaves_no_trace(nth, more):
    failing = FailsAt(nth, more)
    module, seen, trainer = run(MLP, failing)
    twin, twin_seen, _ = run(
        MLP, *([ShrinksAt(trainer.strategy.micro_batch_size)] if trainer.strategy.recoveries else [])
    )

    assert failing.mode.count >= nth + more
    assert torch.equal(weights(module), weights(twin))
    assert seen.callback_metrics == twin_seen.callback_metrics


def test_what_is_insisted_on_is_called_again_until_memory_is_there():
    calls = []

    def call():
        calls.append(1)
        if len(calls) < 3:
            raise MemoryError
        return "done"

    assert insist(call, device=torch.device("cpu")) == "done"
    assert len(calls) == 3


def test_what_never_fits_is_the_error_it_was():
    def call():
        raise RuntimeError(TEXT)

    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        insist(call, device=torch.device("cpu"))


def test_another_error_is_not_insisted_on():
    calls = []

    def call():
        calls.append(1)
        raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        insist(call, device=torch.device("cpu"))
    assert len(calls) == 1
