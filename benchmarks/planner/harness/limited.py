"""Run fits inside an enforced limit.

The limit is a share of the GPU's memory for the allocator, or the address space on a CPU.
"""

import contextlib
import ctypes
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.planner.harness.truth import fit, warm_up
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified import UnifiedStrategy
from lightning_unified.errors import LightningUnifiedError
from lightning_unified.nn.recomputing import RecomputePolicy

__all__ = [
    "FIXED",
    "PRECISION",
    "Limit",
    "Pull",
    "attempt",
    "budget_of",
    "describe_options",
    "limits_of_process",
    "memory_options_of",
    "planned",
    "run",
    "unlimited",
]

PRECISION = {"cpu": "32-true", "cuda": "bf16-mixed"}
"""What is trained in, by device."""

STEPS = 3
"""Steps of a fit.

The second is the first with optimizer state. The third is the first that begins with the memory such a step left behind.
"""

FIXED = {"budget": "90%", "recover": False, "predict": False, "batch_norm": "micro", "check_split": False}
"""Of a strategy that applies the given settings and nothing else."""


LEFT_OPEN = {"micro_batch_size": "auto", "recompute": "auto", "batch_norm": "micro"}
"""Of a strategy that is to choose."""

AMPLE = 2**33
"""Bytes of a budget that every batch fits into undivided, on a CPU."""

GRAIN = 2**24
"""Bytes to which a CPU's peak without a limit is rounded up.

Two fits of one kind are 1 or 2 MiB apart.
"""

MAPPED = 2**17
"""Bytes from which glibc maps a CPU's block by itself, at the start of a process."""


class Limit(L.Callback):
    """Has the GPU's allocator refuse to take more than so many bytes.

    It begins after the strategy has written the settings that the allocator reads once.

    Args:
        bytes: The limit; None sets none.
    """

    def __init__(self, bytes: int | None) -> None:  # noqa: A002
        self.bytes = bytes

    def setup(self, trainer, module, stage):
        if self.bytes is not None and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(self.bytes / torch.cuda.get_device_properties(0).total_memory)


class Pull(L.Callback):
    """Sets what a plan sets beside the size of micro-batches, before the first step.

    Args:
        memory options: As `memory_options_of` gives them; None sets nothing.
    """

    def __init__(self, memory_options: dict[str, Any] | None) -> None:
        self.memory_options = memory_options or {}

    def on_train_start(self, trainer, module):
        policy = trainer.strategy.policy
        if self.memory_options.get("blocks"):
            wanted = RecomputePolicy(
                blocks=self.memory_options["blocks"], keep_attention=self.memory_options["keep_attention"]
            )
            policy.recomputation.set(wanted, why="as the benchmark has it")
        if self.memory_options.get("loss_chunk") is not None:
            policy.applied_options.set_loss_chunk(self.memory_options["loss_chunk"], why="as the benchmark has it")


def memory_options_of(strategy: UnifiedStrategy) -> dict[str, Any]:
    """Return what the plan of a strategy sets beside the size of micro-batches, in plain values."""
    policy = strategy.policy.recomputation.policy
    chosen = {"blocks": 0, "keep_attention": False}
    if policy is not None and policy.blocks != 0:
        chosen = {"blocks": policy.blocks, "keep_attention": policy.keep_attention}
    return chosen | {"loss_chunk": strategy.plan.loss_chunk}


def describe_options(memory_options: dict[str, Any] | None) -> str | None:
    """Return memory options in words."""
    if memory_options is None:
        return None
    blocks = memory_options["blocks"]
    how = (
        "kept"
        if not blocks
        else f"{blocks} blocks recomputed{', attention kept' if memory_options['keep_attention'] else ''}"
    )
    chunk = memory_options.get("loss_chunk")
    return how if chunk is None else f"{how}, loss by {chunk} rows"


@contextlib.contextmanager
def limits_of_process(name: str, device: str, limit: int | None) -> Iterator[None]:
    """Limit the address space that a CPU process may take to `limit` more bytes.

    Threads reserve none of their own, and blocks from `MAPPED` bytes on go back to the system when they are free, so that the limit is
    one on what is in use, not on what glibc keeps; the environment says so, as it would if the process had been started like that. The
    module called `name` has trained on two rows before, unplanned.
    """
    if device != "cpu":
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 1)  # M_ARENA_MAX
        mallopt(-3, MAPPED)  # M_MMAP_THRESHOLD, malloc.h
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED)
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
    name: str,
    device: str,
    rows: int,
    strategy: Callable[[], UnifiedStrategy],
    *,
    limit: int | None,
    memory_options: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train the module called `name` on a batch of `rows` rows; return the most that was taken.

    The strategy is made once the process has its limit, and before anything of the fit is there.
    """
    kind = MODULES[name]
    with limits_of_process(name, device, limit):
        began = _status("VmSize") if device == "cpu" else 0
        chosen = strategy()
        module, batch = kind.build(device), kind.batch(device, rows)
        fit(
            module,
            batch,
            device=device,
            precision=PRECISION[device],
            strategy=chosen,
            callbacks=[Limit(limit), Pull(memory_options)],
            steps=steps,
        )
    if device == "cpu":
        return {"reserved": _status("VmPeak") - began}
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    taken = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    return {**taken, "retries": retries}


def unlimited(name: str, device: str, rows: int) -> dict[str, Any]:
    """Return what a fit takes that runs the whole batch at once, without a limit.

    On a CPU with what planning takes, as of the same memory, and to the next `GRAIN`: what is no tensor differs from run to run.
    """

    def strategy() -> UnifiedStrategy:
        if device == "cpu":
            return UnifiedStrategy(budget=budget_of(device, AMPLE), **LEFT_OPEN)
        return UnifiedStrategy(micro_batch_size=rows, **FIXED)

    if device != "cpu":
        return run(name, device, rows, strategy, limit=None)
    taken = run(name, device, rows, strategy, limit=None, steps=STEPS + 1)["reserved"]
    return {"reserved": -(-taken // GRAIN) * GRAIN, "taken": taken}


def budget_of(device: str, limit: int) -> int:
    """Return a strategy's settings that keep it within `limit` more bytes."""
    return limit + (_status("VmRSS") if device == "cpu" else 0)


def planned(name: str, device: str, rows: int, limit: int) -> dict[str, Any]:
    """Return what the strategy does that is given the limit as its budget, and left to choose.

    On a CPU the strategy counts the whole process, so its budget is the limit and what the process holds before.
    """
    made: list[UnifiedStrategy] = []

    def make() -> UnifiedStrategy:
        made.append(UnifiedStrategy(budget=budget_of(device, limit), **LEFT_OPEN))
        return made[0]

    found: dict[str, Any] = {"outcome": "trained"}
    try:
        found |= run(name, device, rows, make, limit=limit, steps=STEPS + 1)
    except Exception as error:
        is_ours = isinstance(error, LightningUnifiedError)
        found = {"outcome": "refused" if is_ours else "died", "why": f"{type(error).__name__}: {error}"[:400]}
    gc.collect()
    strategy = made[0]
    found |= {"recoveries": strategy.recoveries, "events": [str(event) for event in strategy.events][:8]}
    if strategy.budget is not None and found["outcome"] == "trained":
        plan = strategy.plan
        prediction = getattr(plan, "prediction", None)
        found |= {
            "micro_batch_size": strategy.micro_batch_size,
            "memory_options": memory_options_of(strategy),
            "planned_micro_batch_size": None if prediction is None else prediction.rows,
            "predicted": None if prediction is None else prediction.peak_bytes,
            "predicted_reserved": None if prediction is None else prediction.reserved_bytes,
            "planning_seconds": None if prediction is None else round(prediction.planning_seconds, 3),
            "reasons": dict(plan.reasons),
        }
    return found


def attempt(name: str, device: str, rows: int, size: int, memory_options: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return whether the batch trains in the limit in micro-batches of `size`.

    Nothing is planned or recovered.
    """

    def strategy() -> UnifiedStrategy:
        return UnifiedStrategy(micro_batch_size=size, **FIXED)

    try:
        return {"fits": True, **run(name, device, rows, strategy, limit=limit, memory_options=memory_options)}
    except Exception as error:
        return {"fits": False, "why": f"{type(error).__name__}: {error}"[:200]}
