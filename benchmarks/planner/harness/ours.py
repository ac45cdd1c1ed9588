"""The planner's side of a cell: what is predicted before any step, and in what time."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch import nn

import lightning_unified
from benchmarks.planner.harness.cells import Cell

__all__ = ["predicted", "uninitialised"]

_FILLS = (
    "uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
)  # fmt: skip


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Build modules inside with uninitialised weights.

    That takes no time, and no memory until the weights are read.
    """
    own = {name: getattr(nn.init, name) for name in _FILLS}
    for name in own:
        setattr(nn.init, name, lambda tensor, *_args, **_named: tensor)
    try:
        yield
    finally:
        for name, fill in own.items():
            setattr(nn.init, name, fill)


def predicted(cell: Cell) -> dict[str, Any]:
    """Return what `lightning_unified.predict` says of the cell.

    Args:
        cell: What is to be predicted.
    """
    with uninitialised():
        module = cell.kind.build(cell.device, optimizer=cell.optimizer)
    batch = cell.kind.batch(cell.device, cell.rows)
    began = time.perf_counter()
    prediction = lightning_unified.predict(
        module,
        batch,
        device=cell.device,
        precision=cell.precision,
        recompute=cell.recompute or None,
    )
    seconds = time.perf_counter() - began
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "seconds": round(seconds, 3),
        "allocated": prediction.peak_bytes,
        "reserved": prediction.reserved_bytes,
        "confidence": prediction.confidence,
        "step_seconds": prediction.seconds,
        "instant": prediction.instant,
        "categories": dict(prediction.categories),
        "notes": list(prediction.notes),
    }
