"""Fits inside a limit that holds: a share of the GPU's memory that the allocator may take, or of address space on a CPU."""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import LightningUnifiedError
from planner.modules import MODULES
from planner.truth import fit, warm_up

__all__ = [
    "PRECISION",
    "Limit",
    "attempt",
    "budget_of",
    "limits_of_process",
    "planned",
    "recompute_of",
    "run",
    "unlimited",
]

PRECISION = {"cpu": "32-true", "cuda": "bf16-mixed"}
"""What is trained in, by device."""

STEPS = 5


class Limit(L.Callback):
    """Has the GPU's allocator refuse to take more than so many bytes; after the strategy has written what the allocator reads once.

    Args:
        bytes: The limit; None sets none.
    """

    def __init__(self, bytes: int | None) -> None:  # noqa: A002
        self.bytes = bytes

    def setup(self, trainer, module, stage):
        if self.bytes is not None and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(self.bytes / torch.cuda.get_device_properties(0).total_memory)


@contextlib.contextmanager
def limits_of_process(name: str, device: str, limit: int | None) -> Iterator[None]:
    """On a CPU, have the system refuse the process more than `limit` bytes of address space beyond what it has.

    Threads reserve none of their own, and blocks of 1 MiB or more go back to the system when they are free, so that the limit is one on
    what is in use, not on what glibc keeps. The module called `name` has trained on two rows before.
    """
    if device != "cpu":
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 1)  # M_ARENA_MAX
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD, malloc.h
    warm_up(name, PRECISION[device])
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _status(field: str) -> int:
    """Return `field` of what the system says of this process's memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run(
    name: str, device: str, rows: int, strategy: UnifiedStrategy, *, limit: int | None, steps: int = STEPS
) -> tuple[L.Trainer, int]:
    """Train the module called `name` on a batch of `rows` rows; return the trainer, and the most that was taken."""
    kind = MODULES[name]
    with limits_of_process(name, device, limit):
        began = _status("VmSize") if device == "cpu" else 0
        module, batch = kind.build(device), kind.batch(device, rows)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = fit(
            module,
            batch,
            device=device,
            precision=PRECISION[device],
            strategy=strategy,
            callbacks=[Limit(limit)],
            steps=steps,
        )
    return trainer, torch.cuda.max_memory_reserved() if device == "cuda" else _status("VmPeak") - began


def unlimited(name: str, device: str, rows: int) -> dict[str, Any]:
    """Return what a fit takes that runs the whole batch at once, without a limit."""
    strategy = UnifiedStrategy(micro_batch_size=rows, recompute=_kept(name), budget="90%", recover=False)
    return {"reserved": run(name, device, rows, strategy, limit=None)[1]}


def budget_of(device: str, limit: int) -> int:
    """Return what a strategy is told so that it stays within `limit` bytes beyond what the process holds now."""
    return limit + (_status("VmRSS") if device == "cpu" else 0)


def _kept(name: str) -> Any:
    """Return what keeps activations, where the module leaves a choice."""
    return False if MODULES[name].has_blocks else "auto"


def planned(name: str, device: str, rows: int, limit: int) -> dict[str, Any]:
    """Return what the strategy does that is given the limit as its budget, and left to choose.

    On a CPU the strategy counts the whole process, so its budget is the limit and what the process holds before.
    """
    strategy = UnifiedStrategy(
        budget=budget_of(device, limit), micro_batch_size="auto", recompute="auto", batch_norm="micro"
    )
    found: dict[str, Any] = {"outcome": "trained"}
    try:
        _, found["reserved"] = run(name, device, rows, strategy, limit=limit)
    except Exception as error:
        is_ours = isinstance(error, LightningUnifiedError)
        found = {"outcome": "refused" if is_ours else "died", "why": f"{type(error).__name__}: {error}"[:400]}
    gc.collect()
    found |= {"recoveries": strategy.recoveries, "events": [str(event) for event in strategy.events][:8]}
    if strategy.budget is not None and found["outcome"] == "trained":
        plan = strategy.plan
        prediction = getattr(plan, "prediction", None)
        found |= {
            "micro_batch_size": strategy.micro_batch_size,
            "recompute": recompute_of(plan),
            "predicted": None if prediction is None else prediction.peak_bytes,
            "predicted_reserved": None if prediction is None else prediction.reserved_bytes,
            "planning_seconds": None if prediction is None else round(prediction.planning_seconds, 3),
            "reasons": dict(plan.reasons),
        }
    return found


def recompute_of(plan: Any) -> Any:
    """Return what tells another strategy to recompute what `plan` does."""
    blocks = getattr(plan, "recompute_blocks", None)
    return plan.recompute if blocks is None else blocks


def attempt(name: str, device: str, rows: int, size: int, recompute: Any, limit: int) -> dict[str, Any]:
    """Return whether the batch trains inside the limit in micro-batches of `size`, nothing being recovered."""
    how = _kept(name) if recompute is None else recompute
    how = how if MODULES[name].has_blocks else "auto"
    strategy = UnifiedStrategy(
        micro_batch_size=size, recompute=how, budget="90%", recover=False, batch_norm="micro", check_split=False
    )
    try:
        _, reserved = run(name, device, rows, strategy, limit=limit, steps=3)
    except Exception as error:
        return {"fits": False, "why": f"{type(error).__name__}: {error}"[:200]}
    return {"fits": True, "reserved": reserved}
