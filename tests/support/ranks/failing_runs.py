"""Runs of several ranks that are refused, fail or lose a rank."""

import os
from typing import Any

import lightning as L

from lightning_unified.errors import LightningUnifiedError
from tests.support.ranks.modules import REFUSED, Net, rank
from tests.support.ranks.runs import Fails, fit, net, unplanned


class Ends(L.Callback):
    """Ends one rank's process in the middle of training, without an error."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if rank() == 1 and batch_idx == 2:
            os._exit(7)


def broken(kind: type[Net]) -> Any:
    return fit(net(kind), unplanned())


def unrecovered(phase: str) -> Any:
    return fit(net(), unplanned(recover=False), Fails(phase))


def half_written() -> Any:
    """Run a fit in which memory runs out after one rank wrote some weights.

    The other rank has written no weights.
    """
    return fit(net(), unplanned(), Fails("half written", on=0), Fails("optimizer step", on=1))


def dying() -> Any:
    return fit(net(), unplanned(), Ends())


def refusals() -> dict[str, str]:
    """Return the refusal of each module."""
    return {
        **{name: _refusal(net(kind)) for name, kind in REFUSED.items()},
        "SyncBatchNorm": _refusal(net(norm=True), sync_batchnorm=True),
    }


def _refusal(module: L.LightningModule, **options: Any) -> str:
    try:
        fit(module, unplanned(), **options)
    except (LightningUnifiedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
