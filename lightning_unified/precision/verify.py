"""Verify before the first step that a plugin does what its name says and suits the optimizers."""

import warnings
from collections.abc import Sequence

import torch
from lightning.pytorch.plugins import precision as stock
from torch.optim import LBFGS, Optimizer

from lightning_unified.errors import PrecisionError
from lightning_unified.hardware import Sources
from lightning_unified.hardware.capabilities import MPS_SCALER_SOUND_SINCE
from lightning_unified.hardware.sources import torch_version
from lightning_unified.precision.mixed import live_scaler

__all__ = ["unscales_itself", "verify_plugin"]


def verify_plugin(
    plugin: stock.Precision,
    *,
    device_type: str,
    optimizers: Sequence[Optimizer],
    clips: bool,
    sources: Sources | None = None,
) -> None:
    """Raise unless the plugin does what its name says (R2) and its scaler suits the optimizers (R3).

    Args:
        plugin: Precision plugin of the run.
        device_type: Device type of the module.
        optimizers: All optimizers of the run.
        clips: Whether the Trainer clips gradients.
        sources: Sources of torch's version; default this machine.

    Raises:
        PrecisionError: If autocast is for another device than the module or disabled, if float16 would train without a live
            scaler, or if an optimizer, or the dtype of its parameters, is unusable under a scaler. torch and Lightning raise
            for these in the middle of the first step, or on MPS before torch 2.13 not at all.
    """
    if isinstance(plugin, stock.MixedPrecision):
        _verify_autocast(plugin, device_type)
    scaler = live_scaler(plugin)
    if scaler is None:
        return
    sound = device_type != "mps" or torch_version(sources or Sources.live()) >= MPS_SCALER_SOUND_SINCE
    for optimizer in optimizers:
        _verify_under_scaler(optimizer, clips=clips, sound=sound)


def unscales_itself(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` unscales gradients inside its step, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _verify_autocast(plugin: stock.MixedPrecision, device_type: str) -> None:
    if plugin.device != device_type:
        raise PrecisionError(
            f"precision {plugin.precision!r} was built for {plugin.device} and the module is on {device_type}: it would train in float32 "
            "without saying so. Pass the accelerator as a string, not as an object, or give the precision to the strategy."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it disables autocast; the error below says what to do
        context = plugin.autocast_context_manager()
    if not context._enabled:
        raise PrecisionError(
            f"precision {plugin.precision!r} on {device_type}: torch disables autocast to {context.fast_dtype} here, so the module would "
            "train in float32 without saying so; use 32-true, or another device."
        )
    if plugin.precision != "16-mixed":
        return
    scaler = live_scaler(plugin)
    if scaler is None:
        raise PrecisionError("precision='16-mixed' has no live gradient scaler here; use bf16-mixed or 32-true.")
    if scaler._device != device_type:
        raise PrecisionError(
            f"precision='16-mixed' on {device_type} has a gradient scaler for {scaler._device}; give the plugin "
            f"torch.amp.GradScaler({device_type!r})."
        )


def _verify_under_scaler(optimizer: Optimizer, *, clips: bool, sound: bool) -> None:
    """Raise for combinations that fail with a scaler; `sound` is whether its kernels are correct."""
    name, fused = type(optimizer).__name__, unscales_itself(optimizer)
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if isinstance(optimizer, LBFGS):
        raise PrecisionError(
            "LBFGS with 16-mixed: it evaluates the loss several times a step, which a gradient scaler cannot follow; "
            "use bf16-mixed, 32-true, or another optimizer."
        )
    if fused and clips:
        raise PrecisionError(
            f"gradient_clip_val with the fused {name} and 16-mixed: a fused optimizer unscales inside its step, so there is nothing to "
            "clip before; use fused=False, bf16-mixed, or no clipping."
        )
    if fused and not sound:
        raise PrecisionError(
            f"the fused {name} with 16-mixed on mps applies scaled gradients before torch 2.13 (issue 186360); use fused=False."
        )
    if torch.float16 in dtypes and not fused:
        raise PrecisionError(
            f"{name} holds float16 parameters, whose gradients torch does not unscale, and 16-mixed needs that; leave the module in "
            "float32 (no module.half()): autocast computes in float16 all the same."
        )
    if dtypes & {torch.float16, torch.bfloat16} and not sound:
        raise PrecisionError(
            f"{name} holds 16-bit parameters, whose gradients torch before 2.13 sets to zero in unscaling on mps (issue 184286); leave the "
            "module in float32, or use bf16-mixed."
        )
