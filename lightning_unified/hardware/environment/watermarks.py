"""Hold an allocator to a budget: a hard cap, and a lower mark at which caches are cleared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_unified.hardware.budget import Budget
from lightning_unified.hardware.environment.cuda import set_cuda_environment, written_share
from lightning_unified.hardware.environment.mps import (
    DEFAULT_LOW,
    HIGH,
    LOW,
    LOW_SHARE,
    Cap,
    ratio_of,
    set_mps_environment,
    users_ratio,
)
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.sources import Sources
from lightning_unified.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["Cap", "Watermarks", "cap_allocator", "prepare_allocators", "set_mps_environment", "watermarks"]

# Fractions this process set, by module and device: torch returns the current fraction, not who set it. The module is kept alive, so
# that no other object gets its id.
_HANDED_OVER: dict[tuple[int, int], tuple[Any, float]] = {}
_SAME = 1e-3  # torch stores bytes and divides again when it returns the fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermarks:
    """Bytes: `high` is the allocator's cap, `low` the mark at which caches are cleared."""

    high: int
    low: int


def watermarks(budget: Budget, reading: Reading, environ: Mapping[str, str]) -> Watermarks:
    """Return the watermarks of a budget: the budget and 85 % of it.

    On MPS these are the user's own ratios.

    Args:
        budget: Bytes the run may use.
        reading: Reading of its pool; on MPS the ratios are shares of `total`, Metal's recommended working set.
        environ: Environment with a user's own watermark ratios, if any.
    """
    high, low = budget.bytes, int(LOW_SHARE * budget.bytes)
    if reading.backend != "mps" or reading.total.bytes is None:
        return Watermarks(high=high, low=low)
    own_high, own_low = users_ratio(environ, HIGH), users_ratio(environ, LOW)
    if own_high:  # 0 means no limit, which leaves the budget as the mark
        high = min(high, int(own_high * reading.total.bytes))
    if own_low is not None:
        low = int(own_low * reading.total.bytes)
    return Watermarks(high=high, low=min(low, high))


def prepare_allocators(spec: str | int = "auto", *, sources: Sources | None = None) -> Cap:
    """Write the environment variables that torch's allocators read once, on construction.

    Order contract (R4): call it before anything queries an accelerator.

    Returns:
        The cap written for the accelerator of this machine.

    Raises:
        BudgetError: If the budget cannot be read.
        ConfigurationError: If the user's own settings are ones that torch refuses.
    """
    sources = sources or Sources.live()
    metal, cuda = set_mps_environment(spec, sources=sources), set_cuda_environment(spec, sources=sources)
    return cuda if cuda.applied or getattr(sources.torch.version, "cuda", None) else metal


def cap_allocator(device: "str | torch.device", budget: Budget, *, sources: Sources | None = None) -> Cap:
    """Cap the allocator of `device` at the budget, so that it raises before the machine suffers.

    The cap is a fraction. Its denominator is Metal's recommended working set on MPS, and `props.total_memory` elsewhere, also
    on an APU whose pool is larger than that. The cap covers torch's caching allocator; it does not cover the context, library
    workspaces outside the allocator, or host memory.

    Returns:
        The cap. It is not applied on the CPU, above the denominator, or if a user's own MPS ratio or lower fraction is set;
        `reason` says so.
    """
    sources = sources or Sources.live()
    kind, _, index = str(device).partition(":")
    if kind == "mps":
        return _cap_metal(budget, sources)
    if kind not in {"cuda", "xpu"}:
        return Cap(reason=f"{kind} has no allocator to cap; the plan and the monitor enforce the budget")
    module: Any = getattr(sources.torch, kind)
    if not hasattr(module, "set_per_process_memory_fraction"):
        return Cap(reason=f"this torch has no torch.{kind}.set_per_process_memory_fraction")
    chosen = int(index) if index else int(module.current_device())
    total = int(module.get_device_properties(chosen).total_memory)
    if budget.bytes > total:
        reason = f"the budget is above props.total_memory ({format_bytes(total)}), the cap's denominator: only the pool's end limits it"
        return Cap(reason=reason)
    fraction = budget.bytes / total
    own = _users_fraction(module, chosen, sources.environ)
    if own is not None and own < fraction:
        reason = f"your own memory fraction of {own:.3g} stays: {format_bytes(int(own * total))}, less than the budget"
        return Cap(fraction=own, bytes=int(own * total), reason=reason)
    module.set_per_process_memory_fraction(fraction, chosen)
    _HANDED_OVER[id(module), chosen] = (module, fraction)
    reason = f"{format_bytes(budget.bytes)} of props.total_memory, {format_bytes(total)}"
    return Cap(applied=True, fraction=fraction, bytes=budget.bytes, reason=reason)


def _users_fraction(module: Any, index: int, environ: Mapping[str, str]) -> float | None:
    """Return the fraction set by the user, in this process or its environment.

    The result is None if there is none.
    """
    ask = getattr(module, "get_per_process_memory_fraction", None)
    if ask is None:
        return None
    stands = float(ask(index))
    _, handed_over = _HANDED_OVER.get((id(module), index), (None, 1.0))
    ours = {1.0, handed_over, written_share(environ) or 1.0}
    return None if any(abs(stands - fraction) < _SAME for fraction in ours) else stands


def _cap_metal(budget: Budget, sources: Sources) -> Cap:
    own_high = users_ratio(sources.environ, HIGH)
    if own_high is not None:
        return Cap(fraction=own_high, reason=f"your own {HIGH}={own_high:g} stays")
    recommended = int(sources.torch.mps.recommended_max_memory())
    if recommended <= 0:
        return Cap(reason="Metal names no recommended working set to take a share of")
    fraction = min(budget.bytes / recommended, 2.0)
    sources.torch.mps.set_per_process_memory_fraction(fraction)
    reason = f"{format_bytes(budget.bytes)} of Metal's recommended working set, {format_bytes(recommended)}"
    low = ratio_of(sources.environ, LOW)
    low = DEFAULT_LOW if low is None else low
    warning = None
    if fraction < low:
        warning = f"it lies below LOW ({low:g}), so cached blocks are freed only when the cap is hit, not before"
        reason += f"; {warning}"
    return Cap(applied=True, fraction=fraction, bytes=int(fraction * recommended), reason=reason, warning=warning)
