"""Units: bytes parsed and formatted, durations and rows formatted."""

import math
import re

from lightning_unified.errors import BudgetError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "format_duration", "format_rows", "parse_bytes"]

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Parse an amount of memory into bytes.

    The text is `"28GiB"` (2**30 bytes each), `"28GB"` (10**9), `"512MiB"`, or a plain count.

    Raises:
        BudgetError: If `text` is not a positive quantity in a known unit.

    Example:
        >>> parse_bytes("512MiB")
        536870912
    """
    if isinstance(text, int) and not isinstance(text, bool):
        count = text
    else:
        match = _QUANTITY.fullmatch(str(text))
        unit = match.group(2).upper() if match else ""
        if match is None or (unit and unit not in _UNITS):
            raise BudgetError(
                f"{text!r} is not an amount of memory; write a number and a unit, as in 28GiB, 512MiB or 30GB."
            )
        count = int(float(match.group(1)) * _UNITS[unit or "B"])
    if count <= 0:
        raise BudgetError(f"{text!r} is not a positive amount of memory; write for example 4GiB.")
    return count


def format_bytes(count: int | None) -> str:
    """Format bytes for people: `"1.50 GiB"`, `"12.0 MiB"`, `"unknown"` for None.

    Example:
        >>> format_bytes(3 * 2**29)
        '1.50 GiB'
    """
    if count is None:
        return "unknown"
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def format_duration(seconds: float | None) -> str:
    """Format a duration, with a unit that fits its size.

    Examples: `"850 µs"`, `"12.3 ms"`, `"4.56 s"`, `"22 min 30 s"`, `"3 h 5 min"`, and `"unknown"` for None.

    Example:
        >>> format_duration(1350.4)
        '22 min 30 s'
    """
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if not seconds:
        return "0 s"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s")):
        if float(shown := f"{seconds * factor:.3g}") < limit * factor:
            return f"{float(shown):g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    days, rest = divmod(hours, 24)
    return f"{hours} h {minutes} min" if hours < 48 else f"{days} d {rest} h"


def format_rows(count: int) -> str:
    """Format a number of rows: `"1 row"`, `"8 rows"`."""
    return f"{count} row{'s' * (count != 1)}"
