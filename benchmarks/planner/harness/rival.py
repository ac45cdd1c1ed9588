"""The rival: torch's MemTracker under fake tensors, on the very same modules.

It runs two steps in Lightning's order.
"""

import contextlib
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from benchmarks.planner.harness.cells import Cell
from benchmarks.planner.harness.ours import uninitialised
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.step.split.rules import rules_of

__all__ = ["WORKSPACE", "tracked"]

WORKSPACE = 65 * 2**20
"""Bytes on CUDA that no tracker sees.

cuBLAS takes 32 MiB for each of the two threads that multiply, cublasLt 1 MiB.
"""

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def tracked(cell: Cell) -> dict[str, Any]:
    """Return the tracker's peak: of the second of two steps, when the optimizer's state exists.

    Recomputation is torch's own; a GradScaler is left out, for it reads a value that fake tensors do not have.
    """
    began = time.perf_counter()
    device = torch.device(cell.device)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, uninitialised():
        with device:
            module = cell.kind.build(cell.device, optimizer=cell.optimizer)
        real = {name: fake.from_tensor(value) for name, value in cell.kind.batch(cell.device, cell.rows).items()}
        batch = {name: value.to(device) for name, value in real.items()}
        if cell.recompute:
            _recompute(module)
        tracker = MemTracker()
        optimizer = module.configure_optimizers()
        tracker.track_external(module, optimizer, *batch.values())
        with tracker:
            for step in range(2):
                _step(module, optimizer, batch, cell)
                if step == 0:
                    tracker.reset_mod_stats()
        peak = sum(entry["Total"] for entry in tracker.get_tracker_snapshot("peak").values())
    return {"allocated": peak, "seconds": round(time.perf_counter() - began, 3)}


def _step(module: Any, optimizer: torch.optim.Optimizer, batch: dict, cell: Cell) -> None:
    dtype = _DTYPES.get(cell.precision)
    amp = contextlib.nullcontext() if dtype is None else torch.autocast(cell.device, dtype)
    with amp:
        prepare = rules_of(module, "fit").prepare
        loss = module.training_step(batch if prepare is None else prepare(batch), 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _recompute(module: Any) -> None:
    if hasattr(module, "recompute"):
        module.recompute = True
        return
    for block in find_blocks(module).plain:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call
