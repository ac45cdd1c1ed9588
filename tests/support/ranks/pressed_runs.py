"""Two ranks of which the second alone sees memory pressure."""

from pathlib import Path
from typing import Any

from lightning_unified import RunCheckpoint
from lightning_unified.callbacks.pressure.watch import PressureWatch
from tests.support.ranks.modules import rank
from tests.support.ranks.runs import fit, net, unplanned
from tests.trainer.callbacks.pressure.guards import Scripted


def pressed(folder: str, strategy: str) -> dict[str, Any]:
    """Return a run whose second rank is under critical pressure from the start."""
    PressureWatch.start = lambda self: None
    guard = Scripted("critical" if rank() == 1 else "normal", trace=Path(folder, "pressure.jsonl"))
    saving = RunCheckpoint(folder, monitor=None)
    chosen = unplanned() if strategy == "unified_ddp" else strategy
    result = fit(net(), chosen, guard, saving, max_epochs=3, enable_checkpointing=True, default_root_dir=folder)
    return {**result, "stopped_for": guard.stopped_for, "saved": saving.saved_step}
