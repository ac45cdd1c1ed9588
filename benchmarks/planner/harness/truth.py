"""The memory that a fit really takes.

It is the allocator's counters on a GPU, and live bytes and the process's growth on a CPU.
"""

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

from benchmarks.planner.harness.cells import Cell
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified import UnifiedStrategy

__all__ = ["fit", "grown", "live", "on_gpu", "true_peak", "warm_up"]

STEPS = 4
_HALF_STEPS = 24  # float16: the gradient scaler skips updates until its scale has fallen far enough
_STEADY = "steady state begins"
_M_MMAP_THRESHOLD = -3  # malloc.h


def fit(
    module: L.LightningModule,
    batch: Any,
    *,
    device: str,
    precision: str,
    strategy: L.pytorch.strategies.Strategy | str,
    callbacks: Iterable[L.Callback] = (),
    steps: int = STEPS,
) -> L.Trainer:
    """Train `module` on one batch, `steps` times.

    If a dataset is given, train on `steps` of its batches.
    """
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else device,
        devices=1,
        precision=precision,
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = batch if isinstance(batch, Dataset) else [batch] * steps
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return trainer


class _Made(Dataset):
    """Batches made on request, as a loader's are.

    A step's batch is one, also after it is converted.
    """

    def __init__(self, batch: dict[str, Tensor], steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._batch.items()}


class _Peaks(L.Callback):
    """Counts the steady state apart, from the step after the first update on.

    Optimizer state and the gradients of the earlier step exist then. In float16 the gradient scaler may skip the first updates.
    """

    def __init__(self, steps: int) -> None:
        self.first = self.steady = (0, 0)
        self.seconds = 0.0
        self.has_stepped = False
        self._steps, self._begins = steps, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.has_stepped and trainer.optimizers[0].state:
            self.has_stepped, self._begins = True, batch_idx
            self.first = _gpu_peaks()
            torch.cuda.reset_peak_memory_stats()
            self.seconds = -time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self._steps - 1:
            self.steady = _gpu_peaks()
            if self.has_stepped:
                self.seconds = (self.seconds + time.perf_counter()) / (self._steps - self._begins)


def _gpu_peaks() -> tuple[int, int]:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class _Marks(L.Callback):
    """Puts a mark among the profiler's events where the steady state begins."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            with record_function(_STEADY):
                pass


def _trained(cell: Cell, batch: dict[str, Tensor], callbacks: Iterable[L.Callback] = ()) -> L.Trainer:
    """Train the cell's module on copies of `batch`, made before counting begins."""
    module, steps = cell.kind.build(cell.device, optimizer=cell.optimizer), _steps(cell)
    recompute = cell.recompute if cell.kind.has_blocks else "auto"
    strategy = UnifiedStrategy(
        micro_batch_size=cell.rows, recompute=recompute, budget="90%", recover=False, predict=False
    )
    data = _Made(batch, steps)
    return fit(
        module, data, device=cell.device, precision=cell.precision, strategy=strategy, callbacks=callbacks, steps=steps
    )


def _steps(cell: Cell) -> int:
    return _HALF_STEPS if cell.precision == "16-mixed" and cell.device == "cuda" else STEPS


def _batch(cell: Cell) -> dict[str, Tensor]:
    return cell.kind.batch(cell.device, cell.rows)


def on_gpu(cell: Cell, callbacks: Iterable[L.Callback] = ()) -> dict[str, Any]:
    """Return the GPU's peaks, over the steady state and over all; `callbacks` watch the fit."""
    peaks = _Peaks(_steps(cell))
    trainer = _trained(cell, _batch(cell), [peaks, *callbacks])
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "allocated": peaks.steady[0],
        "reserved": peaks.steady[1],
        "allocated_over_all": max(peaks.first[0], peaks.steady[0]),
        "reserved_over_all": max(peaks.first[1], peaks.steady[1]),
        "step_seconds": round(peaks.seconds, 4),
        "has_stepped": peaks.has_stepped,
        "scale": None if scaler is None else scaler.get_scale(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def live(cell: Cell) -> dict[str, Any]:
    """Return the most bytes that tensors took on the CPU.

    They are the sum of all that the allocator reports to the profiler, in the order of time.
    """
    batch = _batch(cell)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _trained(cell, batch, [_Marks()])
        gc.collect()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins = next(event.start_ns() for event in events if event.name() == _STEADY)
    now = first = steady = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            if event.start_ns() < begins:
                first = max(first, now)
            steady = max(steady, now) if event.start_ns() >= begins else now
    return {"allocated": steady, "allocated_over_all": max(first, steady)}


def grown(cell: Cell, threshold: int | None = None) -> dict[str, Any]:
    """Return by how much the process grew in a fit, as the system counts its memory.

    A fit of two rows has gone before.

    Args:
        cell: What is fitted.
        threshold: Bytes from which the C library is to map blocks one by one, and so to give them back; None leaves it its own, which
            moves.
    """
    if threshold is not None:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, threshold)
    batch = _batch(cell)
    before = warm_up(cell.module, cell.precision)
    _trained(cell, batch)
    return {"reserved": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before}


def warm_up(name: str, precision: str) -> int:
    """Return the bytes that a process holds after a first, small fit on the CPU.

    Training the module called `name` on two rows takes the memory that every process takes once, mostly pages of libraries' code.
    `ru_maxrss` counts anew from the returned bytes.
    """
    kind = MODULES[name]
    strategy = UnifiedStrategy(micro_batch_size=2, budget="90%", check_split=False, predict=False)
    module, batch = kind.build("cpu"), kind.batch("cpu", 2)
    fit(module, batch, device="cpu", precision=precision, strategy=strategy, steps=2)
    del module, batch, strategy
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak of the resident set is what it is now
    return _resident()


def true_peak(device: str) -> Callable[[Cell], dict[str, Any]]:
    """Return what measures tensors on `device`."""
    return live if device == "cpu" else on_gpu


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
