"""Which precision may run where, and the Lightning plugin that runs it: nothing is disabled in silence."""

import difflib
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import PrecisionError

__all__ = [
    "GatedMixedPrecision",
    "PrecisionChoice",
    "build_plugin",
    "choose_precision",
    "plugin_precision",
    "verify_plugin",
]

_CHOICES = ("trainer", "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
_ALIASES = {
    "32": "32-true",
    "fp32": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "fp16-mixed": "16-mixed",
    "64": "64-true",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionChoice:
    """A precision and why it was chosen; `scaler` says whether a gradient scaler must be live."""

    precision: str
    scaler: bool
    reason: str


def choose_precision(
    requested: str, *, backend: str, native_bf16: bool, torch_version: tuple[int, int]
) -> PrecisionChoice:
    """Return the precision to run, by rule R3: what the device, the scaler and the torch version can really do.

    Args:
        requested: Lightning's name of a precision, or `"auto"`.
        backend: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"` or `"xpu"`.
        native_bf16: Whether the device computes in bfloat16 rather than emulating it.
        torch_version: Major and minor.

    Raises:
        PrecisionError: If `requested` is unknown, or known to compute something else here than its name says.

    Source:
        torch 2.13 `torch/amp/grad_scaler.py`; pytorch issues 142397, 150255 (scaler on MPS from 2.8), 139390 (bfloat16 autocast on MPS
        from 2.6).
    """
    name = _ALIASES.get(str(requested), str(requested))
    if name not in _CHOICES:
        near = difflib.get_close_matches(name, _CHOICES, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise PrecisionError(f"precision={requested!r} is not known;{hint} choose one of {', '.join(_CHOICES)}.")
    if name == "auto":
        return _automatic(backend, native_bf16=native_bf16, torch_version=torch_version)
    if name == "64-true" and backend == "mps":
        raise PrecisionError("precision='64-true' on mps: Metal has no float64; use 32-true, or hardware=cpu.")
    if name == "16-mixed" and backend == "cpu":
        raise PrecisionError(
            "precision='16-mixed' on cpu: Lightning gives a CPU no gradient scaler, and bfloat16 needs none; use bf16-mixed or 32-true."
        )
    if name == "16-mixed" and backend == "mps" and torch_version < (2, 8):
        raise PrecisionError(
            f"precision='16-mixed' on mps needs torch 2.8 for its gradient scaler, and this is torch {torch_version[0]}.{torch_version[1]}; "
            "use bf16-mixed or 32-true."
        )
    return PrecisionChoice(precision=name, scaler=name == "16-mixed", reason="as asked")


def _automatic(backend: str, *, native_bf16: bool, torch_version: tuple[int, int]) -> PrecisionChoice:
    if backend == "cpu":
        return PrecisionChoice(
            precision="32-true", scaler=False, reason="bfloat16 autocast on a CPU costs time and saves little memory"
        )
    if native_bf16:
        return PrecisionChoice(
            precision="bf16-mixed",
            scaler=False,
            reason=f"{backend} computes in bfloat16 natively; no gradient scaler is needed",
        )
    if backend == "mps" and torch_version >= (2, 6):
        return PrecisionChoice(
            precision="bf16-mixed", scaler=False, reason="bfloat16 is emulated on this chip, but halves the activations"
        )
    return PrecisionChoice(precision="32-true", scaler=False, reason=f"this {backend} device only emulates bfloat16")


class GatedMixedPrecision(MixedPrecision):
    """Lightning's mixed precision, with a scaler that is live or absent, and a state that survives a change of precision on resume.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device_type: Where autocast runs.
        scaler: For 16-mixed; default a new one.

    Raises:
        PrecisionError: If 16-mixed would run with a disabled scaler.
    """

    def __init__(self, precision: str, *, device_type: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if precision == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device_type)
        if scaler is not None and not scaler.is_enabled():
            raise PrecisionError(
                f"precision='16-mixed' on {device_type}: torch gave a disabled gradient scaler, so small gradients would vanish unscaled; "
                "use bf16-mixed or 32-true."
            )
        super().__init__(precision, device=device_type, scaler=scaler)  # type: ignore[arg-type]

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip; only with a scaler does a fused optimizer forbid it, and Lightning 2.6.6 refuses it without one as well (amp.py)."""
        plugin = MixedPrecision if self.scaler is not None else Precision
        plugin.clip_gradients(self, optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler; a checkpoint made without one (bf16, fp32) starts it anew instead of raising."""
        if self.scaler is not None and not state_dict:
            rank_zero_warn(
                "The checkpoint holds no gradient-scaler state (it was made in another precision); the scaler starts anew."
            )
            return
        super().load_state_dict(state_dict)


def plugin_precision(plugin: Precision) -> str:
    """Return Lightning's name of what `plugin` runs."""
    return str(getattr(plugin, "precision", "32-true"))


def build_plugin(choice: PrecisionChoice, *, device_type: str, given: Precision | None = None) -> Precision:
    """Return the Lightning plugin for `choice` on a device of `device_type` (`"cpu"`, `"cuda"`, `"mps"`, …).

    Args:
        choice: What to run.
        device_type: Where.
        given: The plugin that this one takes the place of. Its gradient scaler is kept if it is live here, for it may be the
            user's own, with settings of its own; one for another device is not (the mistake that rule R2 is about).
    """
    if choice.precision in ("16-mixed", "bf16-mixed"):
        scaler = given.scaler if choice.scaler and isinstance(given, MixedPrecision) else None
        live = scaler is not None and scaler.is_enabled() and scaler._device == device_type
        return GatedMixedPrecision(choice.precision, device_type=device_type, scaler=scaler if live else None)
    if choice.precision in ("16-true", "bf16-true"):
        return HalfPrecision(choice.precision)  # type: ignore[arg-type]
    return DoublePrecision() if choice.precision == "64-true" else Precision()


def verify_plugin(plugin: Precision, *, device_type: str, optimizers: list[Optimizer], clips: bool) -> None:
    """Check, once everything exists, that the plugin does what its name says (rule R2).

    Raises:
        PrecisionError: If autocast is for another device than the module, if float16 would train without a live scaler, or if a
            fused optimizer would have to be clipped under a scaler, which Lightning refuses only in the first step.
    """
    if not isinstance(plugin, MixedPrecision):
        return
    if plugin.device != device_type:
        raise PrecisionError(
            f"precision {plugin.precision!r} was built for {plugin.device} and the module is on {device_type}: it would train in float32 "
            "without saying so. Pass the accelerator as a string, not as an object, or give the precision to the strategy."
        )
    if plugin.precision == "16-mixed" and (plugin.scaler is None or not plugin.scaler.is_enabled()):
        raise PrecisionError("precision='16-mixed' has no live gradient scaler here; use bf16-mixed or 32-true.")
    fused = [
        type(optimizer).__name__ for optimizer in optimizers if getattr(optimizer, "_step_supports_amp_scaling", False)
    ]
    if plugin.scaler is not None and fused and clips:
        raise PrecisionError(
            f"gradient_clip_val with the fused {fused[0]} and 16-mixed: a fused optimizer unscales inside its step, so there is nothing to "
            "clip before; use fused=False, bf16-mixed, or no clipping."
        )
    if device_type == "mps" and plugin.scaler is not None and fused and _torch_version() < (2, 13):
        raise PrecisionError(
            "a fused optimizer with 16-mixed on mps applies scaled gradients before torch 2.13 (issue 186360); use fused=False."
        )


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
