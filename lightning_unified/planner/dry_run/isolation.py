"""Isolation of a dry run: restore generators, loggers and standard output after it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_unified.planner.dry_run.compiled_parts import uncompiled
from lightning_unified.planner.garbage import no_collection
from lightning_unified.step.undo import no_draws

__all__ = ["untouched"]

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_unified", "pytorch_lightning")


@contextmanager
def untouched(*, compiled: bool = True) -> Iterator[None]:
    """Restore generators, loggers, standard output, threads and garbage collection at the end.

    Begin without autocast and inference mode.

    The garbage collector is off inside. A real run frees tensors by reference counts, and a collection in the middle of a trace would
    free storages at arbitrary places.

    Args:
        compiled: Whether the step's compiled functions would run compiled, so that a dry run that calls one is refused.
    """
    with contextlib.ExitStack() as stack:
        # Lightning's `isolate_rng` restores nothing after an error
        stack.callback(_set_rng_states, _collect_rng_states(include_cuda=torch.cuda.is_initialized()))
        stack.enter_context(no_collection())
        stack.enter_context(_one_thread())
        stack.enter_context(_silence())
        stack.enter_context(no_draws())  # a dry run that draws from a Python generator is given up before it does
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))  # the caller may be in the middle of a step
        stack.enter_context(uncompiled(refuse=compiled))
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside.

    A dry run computes with small tensors only, its known values. After each, the other threads wait busily for longer than it took.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@contextmanager
def _silence() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
