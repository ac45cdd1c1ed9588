"""Write the two watermark variables that Metal's allocator reads once, on construction."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.budget import parse_spec
from lightning_unified.hardware.host.memory import host_available, host_total
from lightning_unified.hardware.sources import Sources
from lightning_unified.units import GIB, MIB

__all__ = [
    "DEFAULT_HIGH",
    "DEFAULT_LOW",
    "HIGH",
    "LOW",
    "LOW_SHARE",
    "WRITTEN",
    "Cap",
    "ensure_pair",
    "mps_allocator_initialized",
    "ratio_of",
    "set_mps_environment",
    "users_ratio",
]

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
WRITTEN = "LIGHTNING_UNIFIED_MPS_WRITTEN"
"""Holds the values this package wrote, so that child processes do not mistake them for the user's own."""

DEFAULT_HIGH, DEFAULT_LOW = 1.7, 1.4  # torch's own, on unified memory
LOW_SHARE = 0.85  # judgement: caches are freed before the cap is reached, with space for one more large block
_MAX_RATIO = 2.0

# Metal's recommended working set as a share of RAM: 2/3 on older macOS, up to 107.52 of 128 GiB on current ones.
# Ratios are written against the largest, so that the pair is at or below the budget.
_RECOMMENDED_AT_MOST = 0.84
_MAC_RESERVE_FLOOR, _MAC_RESERVE_SHARE = 4 * GIB, 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """A limit set on an allocator, and its reason.

    Attributes:
        applied: Whether something was changed.
        fraction: The ratio set, None if none was.
        bytes: The bytes that ratio stands for, None if not known yet.
        reason: The change in words, or why there was none.
        warning: An effect the user may not expect; None if there is none.
    """

    applied: bool = False
    fraction: float | None = None
    bytes: int | None = None
    reason: str
    warning: str | None = None


def set_mps_environment(spec: str | int = "auto", *, sources: Sources | None = None) -> Cap:
    """Write the pair of watermark ratios for a budget that is not resolved yet.

    Order contract (R4): call it before any reading or tensor on MPS, because any query to Metal constructs the allocator and
    freezes both ratios. `LOW` can never be changed afterwards. `HIGH` can, and `cap_allocator` sets it once Metal reports its
    working set.

    A user's own pair stays. Half a pair is completed, because torch raises at first use if `HIGH` alone is below 1.4.

    Args:
        spec: The budget as written.
        sources: Default this machine; its `environ` is written to.

    Raises:
        BudgetError: If the budget cannot be read.
        ConfigurationError: If the user's own pair is one that torch refuses.
    """
    sources = sources or Sources.live()
    parsed = parse_spec(spec)
    if not _is_mps(sources):
        return Cap(reason="no MPS here: its watermarks have no meaning")
    ram = host_total(sources).bytes
    if parsed.kind == "share":
        high = parsed.amount
    elif parsed.kind == "bytes" or (
        parsed.kind == "up to" and (not ram or parsed.amount <= _largest_working_set(sources, ram))
    ):
        high = parsed.amount / _largest_working_set(sources, ram) if ram else 1.0
    else:
        high = _safe_high(sources, ram)
        available = host_available(sources).bytes
        if ram and available is not None:
            room = max(available - (parsed.amount if parsed.kind == "leave" else 0), MIB)
            high = min(high, room / _largest_working_set(sources, ram))
    return _write(sources, min(high, 1.0))


def ensure_pair(sources: Sources) -> Cap:
    """Write the safe pair if none is set: the MPS reader calls this before it queries Metal.

    It never raises, so a reading degrades instead of failing; the findings list a pair that torch refuses.
    """
    if HIGH in sources.environ and LOW in sources.environ:
        return Cap(reason=f"{HIGH} and {LOW} stand already")
    try:
        return _write(sources, _safe_high(sources, host_total(sources).bytes))
    except ConfigurationError as error:
        return Cap(reason=str(error))


def mps_allocator_initialized(sources: Sources) -> bool | None:
    """Return whether torch has built the accelerator's allocator; None if torch does not say."""
    try:
        return bool(sources.torch._C._accelerator_isAllocatorInitialized())
    except Exception:
        return None


def ratio_of(environ: Mapping[str, str], variable: str) -> float | None:
    """Return the ratio in a variable, None if it is not set.

    Raises:
        ConfigurationError: If it holds no number.
    """
    text = environ.get(variable)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(
            f"{variable}={text!r} is not a number; write a ratio from 0 to 2, as in 0.9, or unset it."
        ) from None


def users_ratio(environ: Mapping[str, str], variable: str) -> float | None:
    """Return the ratio the user put into a variable; one this package wrote is not the user's."""
    if f"{variable}={environ.get(variable)}" in environ.get(WRITTEN, "").split():
        return None
    return ratio_of(environ, variable)


def _write(sources: Sources, high: float) -> Cap:
    environ = sources.environ
    own_high, own_low = users_ratio(environ, HIGH), users_ratio(environ, LOW)
    if own_high is not None and own_low is not None:
        _check_pair(own_high, own_low)
        reason = f"your own pair stays: {HIGH}={own_high:g}, {LOW}={own_low:g}"
        return Cap(fraction=own_high, reason=reason)
    initialized = mps_allocator_initialized(sources)
    if initialized:
        return Cap(
            reason=f"too late: Metal's allocator exists and has read {HIGH} and {LOW}; only HIGH can still change"
        )
    if not isinstance(environ, MutableMapping):
        return Cap(reason="the environment cannot be written to")
    if own_high is not None:
        return _complete(environ, own_high)
    high = max(round(high, 4), own_low or 0.0001)
    if own_low is None:
        environ[LOW] = f"{LOW_SHARE * high:.4f}"
    else:
        _check_pair(high, own_low)
    environ[HIGH] = f"{high:.4f}" if own_low is None else f"{high:g}"
    environ[WRITTEN] = f"{HIGH}={environ[HIGH]}" + ("" if own_low is not None else f" {LOW}={environ[LOW]}")
    kept = "" if own_low is None else f"; your {LOW} stays"
    when = (
        "before Metal's allocator exists" if initialized is False else "; this torch cannot say whether it is in time"
    )
    when = f"{when}{kept}".removeprefix("; ")
    return Cap(applied=True, fraction=high, reason=f"wrote {HIGH}={environ[HIGH]} with {LOW}={environ[LOW]}, {when}")


def _complete(environ: MutableMapping[str, str], high: float) -> Cap:
    _check_pair(high, 0.0)
    if high == 0 or high >= DEFAULT_LOW:
        return Cap(
            applied=False,
            fraction=high,
            bytes=None,
            reason=f"your {HIGH}={high:g} stays; torch's own LOW of 1.4 is valid beside it",
        )
    environ[LOW] = f"{LOW_SHARE * high:.4f}"
    environ[WRITTEN] = f"{LOW}={environ[LOW]}"
    return Cap(
        applied=True,
        fraction=high,
        reason=f"your {HIGH}={high:g} stays; wrote {LOW}={environ[LOW]} beside it: torch's LOW of 1.4 would have been refused",
    )


def _check_pair(high: float, low: float) -> None:
    if not 0 <= high <= _MAX_RATIO or not 0 <= low <= _MAX_RATIO or (high > 0 and low > high):
        raise ConfigurationError(
            f"{HIGH}={high:g} with {LOW}={low:g} is a pair that torch refuses at first use of MPS; "
            f"HIGH is 0 (no limit) to 2 and LOW 0 to HIGH: for example 0.9 and 0.75. Or unset both."
        )


def _safe_high(sources: Sources, ram: int | None) -> float:
    """Return min(95 % of the working set, RAM less 15 % and at least 4 GiB) as a ratio.

    It is 0.95 if RAM is unknown.
    """
    if not ram:
        return 0.95
    left = max(ram - max(_MAC_RESERVE_FLOOR, _MAC_RESERVE_SHARE * ram), ram / 2)
    return min(0.95, left / _largest_working_set(sources, ram))


def _largest_working_set(sources: Sources, ram: int) -> float:
    wired = sources.sysctl("iogpu.wired_limit_mb")
    return float(wired * MIB) if isinstance(wired, int) and wired > 0 else _RECOMMENDED_AT_MOST * ram


def _is_mps(sources: Sources) -> bool:
    mps = getattr(getattr(sources.torch, "backends", None), "mps", None)
    return mps is not None and bool(mps.is_available())
