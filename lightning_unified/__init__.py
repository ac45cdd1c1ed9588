"""Train any LightningModule inside a memory budget.

`import lightning_unified` registers the strategies `"unified"`, `"unified_ddp"` and `"unified_fsdp"` with Lightning, before or after Lightning is imported. It imports
neither torch nor Lightning, so a project that only reads this package's configuration does not wait for them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_unified import _registration

if TYPE_CHECKING:
    from lightning_unified._pytorch_lightning import replace_pytorch_lightning
    from lightning_unified.callbacks import (
        CudaGraphs,
        GracefulInterrupt,
        GradientHealth,
        MemoryMonitor,
        PressureGuard,
        RunCheckpoint,
    )
    from lightning_unified.cost_model import Plan
    from lightning_unified.cost_model.prediction import Prediction
    from lightning_unified.cost_model.rates import tabled_rates
    from lightning_unified.hardware import Reading, read
    from lightning_unified.hardware.out_of_memory import is_out_of_memory
    from lightning_unified.micro_batches import MergeRules, MicroBatchRules, RowRules
    from lightning_unified.planner.predict import plan, predict
    from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO
    from lightning_unified.strategies import UnifiedDDPStrategy, UnifiedFSDPStrategy, UnifiedStrategy

__all__ = [
    "AtomicCheckpointIO",
    "CudaGraphs",
    "GracefulInterrupt",
    "GradientHealth",
    "MemoryMonitor",
    "MergeRules",
    "MicroBatchRules",
    "Plan",
    "Prediction",
    "PressureGuard",
    "Reading",
    "RowRules",
    "RunCheckpoint",
    "UnifiedDDPStrategy",
    "UnifiedFSDPStrategy",
    "UnifiedStrategy",
    "is_out_of_memory",
    "plan",
    "predict",
    "read",
    "replace_pytorch_lightning",
    "tabled_rates",
]

_HOMES = {
    "AtomicCheckpointIO": "step.recovery.checkpoint_io",
    "CudaGraphs": "callbacks",
    "GracefulInterrupt": "callbacks",
    "GradientHealth": "callbacks",
    "MemoryMonitor": "callbacks",
    "MergeRules": "micro_batches",
    "MicroBatchRules": "micro_batches",
    "Plan": "cost_model",
    "Prediction": "cost_model.prediction",
    "PressureGuard": "callbacks",
    "Reading": "hardware",
    "RowRules": "micro_batches",
    "RunCheckpoint": "callbacks",
    "UnifiedDDPStrategy": "strategies",
    "UnifiedFSDPStrategy": "strategies",
    "UnifiedStrategy": "strategies",
    "is_out_of_memory": "hardware.out_of_memory",
    "plan": "planner.predict",
    "predict": "planner.predict",
    "read": "hardware",
    "replace_pytorch_lightning": "_pytorch_lightning",
    "tabled_rates": "cost_model.rates",
}

_registration.register()


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_unified' has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"lightning_unified.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
