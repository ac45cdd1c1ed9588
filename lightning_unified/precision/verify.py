"""Verify the precision of a run before the first step.

The plugin must do what its name says and suit the optimizers. A plugin that would fail, or compute something else silently, raises.
Effects of float16 that show no error and may be intended are warned about.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence

import lightning as L
import torch
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_unified.errors import PrecisionError
from lightning_unified.hardware import Sources
from lightning_unified.hardware.capabilities import MPS_SCALER_SOUND_SINCE
from lightning_unified.hardware.sources import torch_version
from lightning_unified.precision.mixed import live_scaler
from lightning_unified.precision.resolve import plugin_precision

__all__ = ["float16_warnings", "verify_plugin", "verify_run"]

_NAMED = 2  # number of layers or parameters a warning names; the others are counted
_WITHOUT_RULE = (
    (nn.BCELoss, "autocast on CUDA refuses it, because its logarithms overflow; use nn.BCEWithLogitsLoss"),
    (
        nn.RMSNorm,
        "autocast on CUDA runs it in float32 since torch 2.13; use bf16-mixed, or convert its input to float32",
    ),
)


def verify_run(trainer: L.Trainer) -> None:
    """Raise if the precision would fail in the first step, or compute something else silently.

    Effects of float16 that may be intended are warned about.

    Raises:
        PrecisionError: If the Trainer's flag was ignored, or as `verify_plugin` says.
    """
    _refuse_ignored_flag(trainer)
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    kind, optimizers = strategy.root_device.type, strategy.optimizers
    verify_plugin(plugin, device_type=kind, optimizers=optimizers, clips=bool(trainer.gradient_clip_val))
    if trainer.state.fn == TrainerFn.FITTING:
        for warning in float16_warnings(trainer.lightning_module, plugin, device_type=kind, optimizers=optimizers):
            rank_zero_warn(warning)


def _refuse_ignored_flag(trainer: L.Trainer) -> None:
    """Raise if a plugin carried by the strategy made Lightning ignore `Trainer(precision=…)`.

    A flag of 32-true is indistinguishable from no flag.

    Source:
        lightning/pytorch/trainer/connectors/accelerator_connector.py, `_check_config_and_set_final_flags` (2.6.6).
    """
    connector = trainer._accelerator_connector
    flag, runs = connector._precision_flag, plugin_precision(trainer.precision_plugin)
    if connector._precision_plugin_flag is not None and flag not in ("32-true", runs):
        raise PrecisionError(
            f"Trainer(precision={flag!r}) and a strategy that carries a plugin for {runs!r}: Lightning would run the plugin without saying "
            "so. Give the plugin as Trainer(plugins=[…]) instead, or no precision to the Trainer."
        )


def verify_plugin(
    plugin: stock.Precision,
    *,
    device_type: str,
    optimizers: Sequence[Optimizer],
    clips: bool,
    sources: Sources | None = None,
) -> None:
    """Raise unless the plugin does what its name says (R2) and its scaler fits (R3).

    The scaler must suit the optimizers.

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
    """Raise for combinations that fail with a scaler.

    `sound` is whether its kernels are correct.
    """
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


def float16_warnings(
    module: L.LightningModule, plugin: stock.Precision, *, device_type: str, optimizers: Iterable[Optimizer]
) -> Iterator[str]:
    """Yield warnings about float16 effects of the run, each with a remedy.

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
