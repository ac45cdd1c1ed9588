"""The file of micro-batch sizes, from which a resumed or repeated run starts."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_unified.hardware import parse_spec
from lightning_unified.nn.module_tree.walks import tensors_of

if TYPE_CHECKING:
    from lightning_unified.step.recovery.budget_watch import BudgetWatch

__all__ = ["SizesFile", "fingerprint"]

log = logging.getLogger("lightning_unified")


def fingerprint(module: nn.Module, watch: "BudgetWatch", *, precision: str, recompute: bool | None) -> dict[str, Any]:
    """Return the conditions of sizes: module, precision, recomputation, device, budget.

    Saved sizes hold only under equal conditions.
    """
    reading, written = watch.reading(), parse_spec(watch.spec)
    parameters, _ = tensors_of(module)
    return {
        "module": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "precision": precision,
        "recompute": recompute,
        "device": reading.name,
        "total_bytes": reading.total.bytes,
        # as written: the bytes left by other programs differ from run to run, so saved sizes would never match
        "budget": written.text if written.kind in ("auto", "leave") else watch.bytes,
    }


class SizesFile:
    """The file of this run's sizes; before it exists, the newest one of neighbouring runs.

    Neighbouring runs are those in the directories beside this run's. Only a file with the wanted fingerprint is used.

    Args:
        path: The file; with None, nothing is read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)

    def read(self, wanted: dict[str, Any]) -> dict[str, Any] | None:
        """Return the state saved under the fingerprint `wanted`; None if no readable file has it."""
        if self._path is None:
            return None
        beside = sorted(self._path.parent.parent.glob(f"*/{self._path.name}"), key=_modified, reverse=True)
        for path in (self._path, *beside):
            try:
                state = json.loads(path.read_text())
                if state["fingerprint"] == wanted:
                    log.info("Micro-batch sizes are those that %s found.", path)
                    return state
            except (OSError, ValueError, KeyError, TypeError):  # absent, cut short, or another program's
                continue
        return None

    def write(self, state: dict[str, Any]) -> None:
        """Write the file, whole or not at all; warn once if it cannot be written."""
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(state, indent=1))
            new.replace(self._path)
        except OSError as error:
            log.warning("Micro-batch sizes are not saved in %s: %s", self._path, error)
            self._path = None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
