"""Rules of precision by device, torch version and scaler, without Lightning."""

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_unified.errors import PrecisionError
from lightning_unified.hardware import Sources, capabilities, capability

if TYPE_CHECKING:
    import torch

__all__ = ["Platform", "PrecisionChoice", "choose_precision", "full_name", "platform_of"]

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
class Platform:
    """Properties of a machine that the rules depend on.

    Attributes:
        backend: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"` or `"xpu"`.
        native_bf16: Whether the device computes in bfloat16 rather than emulating it.
    """

    backend: str
    native_bf16: bool

    @property
    def device_type(self) -> str:
        """Torch's name of the device, as scaler and autocast take it."""
        return "cuda" if self.backend == "rocm" else self.backend


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionChoice:
    """A precision and its reason; `scaler` says whether a gradient scaler must be live."""

    precision: str
    scaler: bool
    reason: str


def platform_of(device: "torch.device", *, sources: Sources | None = None) -> Platform:
    """Return the platform of `device`; on MPS this constructs Metal's allocator."""
    sources = sources or Sources.live()
    rocm = device.type == "cuda" and sources.torch.version.hip is not None
    return Platform(
        backend="rocm" if rocm else device.type,
        native_bf16=capability("bf16", capabilities(device, sources=sources)) == "native",
    )


def full_name(requested: str) -> str:
    """Return Lightning's full name of a precision, `"auto"` or `"trainer"`.

    Raises:
        PrecisionError: If the name is unknown.

    Example:
        >>> full_name("bf16")
        'bf16-mixed'
    """
    name = _ALIASES.get(str(requested), str(requested))
    if name not in _CHOICES:
        near = difflib.get_close_matches(name, _CHOICES, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise PrecisionError(f"precision={requested!r} is not known;{hint} choose one of {', '.join(_CHOICES)}.")
    return name


def choose_precision(requested: str, *, platform: Platform) -> PrecisionChoice:
    """Return the precision to run, by rule R3: the one that device and scaler support.

    Raises:
        PrecisionError: If `requested` is unknown, or would compute something else on this platform than its name says.

    Source:
        torch 2.13 `torch/amp/grad_scaler.py`.
    """
    name, backend = full_name(requested), platform.backend
    if name == "auto":
        return _automatic(platform)
    if name == "64-true" and backend == "mps":
        raise PrecisionError("precision='64-true' on mps: Metal has no float64; use 32-true, or hardware=cpu.")
    if name == "16-mixed" and backend == "cpu":
        raise PrecisionError(
            "precision='16-mixed' on cpu: Lightning gives a CPU no gradient scaler, and bfloat16 needs none; use bf16-mixed or 32-true."
        )
    return PrecisionChoice(precision=name, scaler=name == "16-mixed", reason="as asked")


def _automatic(platform: Platform) -> PrecisionChoice:
    backend = platform.backend
    if backend == "cpu":
        return PrecisionChoice(
            precision="32-true", scaler=False, reason="bfloat16 autocast on a CPU costs time and saves little memory"
        )
    if platform.native_bf16:
        return PrecisionChoice(
            precision="bf16-mixed",
            scaler=False,
            reason=f"{backend} computes in bfloat16 natively; no gradient scaler is needed",
        )
    if backend == "mps":
        return PrecisionChoice(
            precision="bf16-mixed", scaler=False, reason="bfloat16 is emulated on this chip, but halves the activations"
        )
    return PrecisionChoice(precision="32-true", scaler=False, reason=f"this {backend} device only emulates bfloat16")
