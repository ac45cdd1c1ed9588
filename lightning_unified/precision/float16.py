"""Warn about effects of float16 that show no error. Nothing is refused: each may be intended."""

from collections.abc import Iterable, Iterator, Sequence

import lightning as L
import torch
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_unified.precision.mixed import live_scaler
from lightning_unified.precision.resolve import plugin_precision
from lightning_unified.precision.verify import unscales_itself

__all__ = ["float16_warnings"]

_NAMED = 2  # number of layers or parameters a warning names; the others are counted
_WITHOUT_RULE = (
    (nn.BCELoss, "autocast on CUDA refuses it, because its logarithms overflow; use nn.BCEWithLogitsLoss"),
    (
        nn.RMSNorm,
        "autocast on CUDA runs it in float32 since torch 2.13; use bf16-mixed, or convert its input to float32",
    ),
)


def float16_warnings(
    module: L.LightningModule, plugin: stock.Precision, *, device_type: str, optimizers: Iterable[Optimizer]
) -> Iterator[str]:
    """Yield warnings about float16 effects of the run, each with a remedy.

    Args:
        module: Module in the precision it trains in.
        plugin: Precision plugin of the run.
        device_type: Device type of the run.
        optimizers: All optimizers of the run.

    Source:
        Autocast's tables of operators for MPS and CUDA, torch 2.13. Layers are seen; calls of `torch.nn.functional` are not.
    """
    scaler = live_scaler(plugin)
    halves = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if halves and scaler is None:
        yield (
            f"{_named(halves)}: float16 parameters train without a gradient scaler, so gradients below 6e-8 become zero. Use "
            "bf16-true, which has the range of float32, or 16-mixed with the parameters in float32."
        )
    fused = any(unscales_itself(optimizer) for optimizer in optimizers)
    if fused and scaler is not None and is_overridden("configure_gradient_clipping", module):
        yield (
            f"{type(module).__name__}.configure_gradient_clipping will see gradients still multiplied by the scale, because a "
            "fused optimizer unscales inside its step. Use fused=False if it clips."
        )
    if device_type == "mps" and plugin_precision(plugin) == "16-mixed":
        for kind, instead in _WITHOUT_RULE:
            found = [name or type(module).__name__ for name, child in module.named_modules() if isinstance(child, kind)]
            if found:
                yield f"{_named(found)}: autocast on mps has no rule for {kind.__name__}, which runs in float16; {instead}."


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
