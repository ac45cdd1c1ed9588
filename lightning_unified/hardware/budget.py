"""Resolve a memory budget: the bytes a run may use, from a text and a reading of the pool.

| text | bytes |
|---|---|
| `auto` | available bytes plus those this process holds, less a reserve for everything else |
| `28GiB`, `30GB`, a count | as written; an amount above the pool is an error |
| `up to 28GiB` | as written; of a smaller pool what `auto` gives |
| `60%` | a share of the pool's total |
| `leave 6GiB` | available bytes plus those this process holds, less the amount; read again during the run |

A budget is never clamped silently: a run tuned for one budget must not start with another. The memory tiers are written with `up to`,
because a tier stands for a class of machines; the reason of the budget then says what the pool gives.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median_low
from types import MappingProxyType
from typing import Literal

from lightning_unified.errors import BudgetError
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.sources import read_text, shipped_configuration
from lightning_unified.units import GIB, MIB, format_bytes, parse_bytes

__all__ = [
    "Budget",
    "BudgetFollower",
    "Spec",
    "divide_budget",
    "fixed_tiers",
    "follow_budget",
    "parse_spec",
    "resolve_budget",
    "unified_reserve",
]

_EXAMPLES = "write auto, 28GiB, up to 28GiB, 60% (of the pool) or leave 6GiB (for everything else)"
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
_SHIPPED_BUDGET = re.compile(r"^  budget: up to (\S+)$", re.MULTILINE)
_UP_TO = re.compile(r"\s*up\s+to\s+(.+?)\s*", re.IGNORECASE)
_LEAVE = re.compile(r"\s*leave\s+(.+?)\s*", re.IGNORECASE)

# Judgement, after unified-memory practice: on one pool the system, the loader and the page cache need memory too.
_RESERVE_FLOOR, _RESERVE_SHARE = 4 * GIB, 0.10
_DEDICATED_RESERVE_SHARE = 0.05
_METAL_SHARE, _METAL_HOST_SHARE = 0.95, 0.15

_EVERY_S = 2.0
_HYSTERESIS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes this run may use.

    Attributes:
        bytes: The amount, including bytes this process already holds.
        spec: The budget as written.
        reason: Derivation of the amount, for people.
        follows_others: Whether the amount follows other programs' use and is resolved again during the run.
        sharers: Number of processes of the run on the same pool; this budget is one process's part.
    """

    bytes: int
    spec: str
    reason: str
    follows_others: bool
    sharers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A parsed budget.

    `amount` is bytes for "bytes", "up to" and "leave", a share in 0..1 for "share", 0 for "auto".
    """

    kind: Literal["auto", "bytes", "up to", "share", "leave"]
    amount: float
    text: str


@cache
def fixed_tiers() -> Mapping[str, int]:
    """Return the bytes of each shipped memory tier that states an amount.

    `conf/memory/*.yaml` is the one list of tiers.
    """
    texts = {path.stem: read_text(path) or "" for path in sorted((shipped_configuration() / "memory").glob("*.yaml"))}
    specs = {name: found.group(1) for name, text in texts.items() if (found := _SHIPPED_BUDGET.search(text))}
    return MappingProxyType({name: parse_bytes(spec) for name, spec in specs.items()})


def parse_spec(spec: str | int) -> Spec:
    """Parse a budget as written, without a pool.

    Raises:
        BudgetError: If the text has none of the five forms, or names less than a MiB (a forgotten unit).
    """
    text = str(spec).strip()
    if isinstance(spec, bool) or not isinstance(spec, (str, int)) or not text:
        raise BudgetError(f"a budget of {spec!r} is not an amount of memory; {_EXAMPLES}.")
    if text.lower() == "auto":
        return Spec(kind="auto", amount=0, text="auto")
    if percent := _PERCENT.fullmatch(text):
        share = float(percent.group(1)) / 100
        if not 0 < share <= 1:
            raise BudgetError(f"a budget of {text!r} is not a share of a pool; write more than 0% and at most 100%.")
        return Spec(kind="share", amount=share, text=text)
    leave, up_to = _LEAVE.fullmatch(text), _UP_TO.fullmatch(text)
    worded = leave or up_to
    try:
        amount = parse_bytes(worded.group(1) if worded else spec)
    except BudgetError as error:
        raise BudgetError(f"a budget of {text!r} cannot be read; {_EXAMPLES}.") from error
    if amount < MIB:
        raise BudgetError(
            f"a budget of {text!r} is {amount} bytes; was a unit forgotten? {_EXAMPLES[0].upper()}{_EXAMPLES[1:]}."
        )
    return Spec(kind="leave" if leave else "up to" if up_to else "bytes", amount=amount, text=text)


def resolve_budget(spec: str | int, reading: Reading) -> Budget:
    """Return the bytes a run may use on the pool of `reading`.

    A stated amount is never clamped: a run that was tuned for one budget and silently got another is worse than one that did not
    start. An unavailable amount is an error that names the available one, except with "up to".

    Args:
        spec: `"auto"`, an amount (`"28GiB"` or a count), `"up to 28GiB"`, `"60%"` of the pool, `"leave 6GiB"` for everything else.
        reading: A fresh reading of the pool.

    Raises:
        BudgetError: If the text has none of these forms, the pool is smaller, or a figure the text needs is unknown.
    """
    parsed = parse_spec(spec)
    if parsed.kind == "auto":
        return _auto(reading)
    if parsed.kind == "leave":
        return _leave(parsed, reading)
    total, what = (
        reading.total.bytes,
        f"the pool of {reading.device}, {format_bytes(reading.total.bytes)} ({reading.total.source})",
    )
    if parsed.kind == "share":
        if total is None:
            raise BudgetError(
                f"a budget of {parsed.text} needs the size of the pool ({reading.total.source}); write an amount, as in 8GiB."
            )
        amount = math.floor(parsed.amount * total)
        return Budget(bytes=amount, spec=parsed.text, reason=f"{parsed.text} of {what}", follows_others=False)
    amount = int(parsed.amount)
    if total is not None and amount > total and parsed.kind == "up to":
        given = _auto(reading)
        reason = f"{what}, is less than {format_bytes(amount)}, so the run takes what auto gives: {given.reason}"
        return replace(given, bytes=min(given.bytes, amount), spec=parsed.text, reason=reason)
    if total is not None and amount > total:
        raise BudgetError(f"a budget of {format_bytes(amount)} is above {what}; {_what_fits(total, fixed_tiers())}.")
    return Budget(bytes=amount, spec=parsed.text, reason=_stated(amount, reading, what), follows_others=False)


def divide_budget(budget: Budget, reading: Reading, *, sharers: int) -> Budget:
    """Return one process's part of `budget`, for `sharers` processes on the same pool.

    A stated amount is divided evenly. Of other budgets, each process keeps what it holds and gets an equal part of the rest.

    Args:
        budget: Budget resolved by this process.
        reading: Reading it was resolved from.
        sharers: Number of processes, this one included.
    """
    if sharers == 1:
        return budget
    own = 0 if parse_spec(budget.spec).kind in ("bytes", "up to", "share") else reading.allocated.bytes or 0
    amount = own + (budget.bytes - own) // sharers
    reason = f"one part of {sharers}, for as many processes on the same memory: {budget.reason}"
    return replace(budget, bytes=max(amount, MIB), sharers=sharers, reason=reason)


def unified_reserve(ram: int) -> int:
    """Return the bytes of a unified pool that `"auto"` reserves: 10 % of RAM, at least 4 GiB."""
    return max(_RESERVE_FLOOR, math.ceil(_RESERVE_SHARE * ram))


def _auto(reading: Reading) -> Budget:
    """Return the available and held bytes, less a reserve of at most half of them.

    The half serves small machines: with 3 GiB available, a reserve of 4 GiB would leave nothing to train with.
    """
    reach, total = _reach(reading, "auto"), reading.total.bytes
    if reading.pool == "dedicated":
        reserve = math.ceil(_DEDICATED_RESERVE_SHARE * (total or reach))
        why = f"5 % of the card ({format_bytes(reserve)}) stays free for other programs' growth and fragmentation"
    elif reading.backend == "mps":
        return _auto_metal(reading, reach)
    else:
        reserve = unified_reserve(total or reach)
        why = f"{format_bytes(reserve)} (10 %, at least 4 GiB) stay for the system and the loader, which draw on the same pool"
    if reserve > reach // 2:
        reserve = reach // 2
        why = f"the usual reserve is more than half of it, so half ({format_bytes(reserve)}) stays for everything else"
    have = f"{format_bytes(reach)} is available ({_sources(reading)})"
    return Budget(bytes=reach - reserve, spec="auto", reason=f"{have}; {why}", follows_others=False)


def _auto_metal(reading: Reading, reach: int) -> Budget:
    """Return a budget bounded by Metal's recommended working set.

    Metal's default limit, 1.7 times the working set, exceeds the RAM of every Mac.
    """
    bounds = {f"the memory available now ({_sources(reading)})": reach}
    if reading.total.bytes is not None:
        bounds["95 % of Metal's recommended working set"] = math.floor(_METAL_SHARE * reading.total.bytes)
    if reading.host.bytes is not None:
        ram = reading.host.bytes
        left = ram - max(_RESERVE_FLOOR, math.ceil(_METAL_HOST_SHARE * ram))
        bounds["RAM less 15 %, at least 4 GiB, for everything else"] = max(left, ram // 2)
    reason, amount = min(bounds.items(), key=lambda bound: bound[1])
    return Budget(bytes=amount, spec="auto", reason=f"{format_bytes(amount)} is {reason}", follows_others=False)


def _leave(parsed: Spec, reading: Reading) -> Budget:
    reach, leave = _reach(reading, parsed.text), int(parsed.amount)
    if leave >= reach:
        raise BudgetError(
            f"'{parsed.text}' leaves nothing to train with: {format_bytes(reach)} is available on {reading.device} "
            f"({_sources(reading)}); leave less than that, or close other programs."
        )
    return _leaving(parsed.text, leave, reach, reading)


def _leaving(spec: str, leave: int, reach: int, reading: Reading) -> Budget:
    reason = f"{format_bytes(reach)} is available ({_sources(reading)}), less {format_bytes(leave)} for everything else; read again while running"
    return Budget(bytes=max(reach - leave, MIB), spec=spec, reason=reason, follows_others=True)


def follow_budget(budget: Budget, reading: Reading) -> Budget:
    """Return a `leave` budget resolved from a fresh reading; other budgets stay as they are.

    A reading without the available bytes changes nothing. A running fit is never refused: if nothing is left, the least
    budget (1 MiB) makes it use as little as it can.
    """
    parsed = parse_spec(budget.spec)
    if parsed.kind != "leave" or reading.available.bytes is None:
        return budget
    reach = reading.available.bytes + (reading.allocated.bytes or 0)
    reach = reach if reading.total.bytes is None else min(reach, reading.total.bytes)
    return divide_budget(_leaving(parsed.text, int(parsed.amount), reach, reading), reading, sharers=budget.sharers)


def _reach(reading: Reading, spec: str) -> int:
    """Return the bytes that this process could hold now: available plus own live ones, at most the pool."""
    if reading.available.bytes is None:
        raise BudgetError(
            f"a budget of {spec!r} needs what is available on {reading.device} ({reading.available.source}); "
            f"write an amount, as in 8GiB, or a share, as in 60%."
        )
    reach = reading.available.bytes + (reading.allocated.bytes or 0)
    reach = reach if reading.total.bytes is None else min(reach, reading.total.bytes)
    if reach < 2 * MIB:
        raise BudgetError(
            f"nothing is available on {reading.device} ({reading.available.source}); close other programs."
        )
    return reach


def _sources(reading: Reading) -> str:
    return (
        f"{reading.available.source} + own {reading.allocated.source}"
        if reading.allocated.bytes
        else reading.available.source
    )


def _stated(amount: int, reading: Reading, what: str) -> str:
    available, held = reading.available.bytes, reading.allocated.bytes or 0
    if available is not None and amount > available + held:
        return (
            f"as written, of {what}; only {format_bytes(available + held)} of it is available now "
            f"({reading.available.source}), the rest is in use by other programs"
        )
    return f"as written, of {what}"


def _what_fits(total: int, tiers: Mapping[str, int]) -> str:
    fitting = {name: amount for name, amount in tiers.items() if amount <= total}
    if not fitting:
        return f"no fixed tier fits; use memory=auto, or an amount up to {format_bytes(total)}"
    name = max(fitting, key=lambda tier: fitting[tier])
    return f"the largest tier that fits is memory={name} ({format_bytes(fitting[name])}), the largest amount {format_bytes(total)}"


class BudgetFollower:
    """Resolves a `leave` budget again every two seconds, and reports changes of 5 % or more.

    A change needs two readings in a row in the same direction; the one nearer to the current budget is taken. So a program
    that starts and ends quickly changes nothing.

    Args:
        budget: Budget as resolved at the start.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, budget: Budget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._read_at = clock()
        self._before = budget

    @property
    def due(self) -> bool:
        """Whether it is time for a new reading; costs one look at the clock."""
        return self.budget.follows_others and self._clock() - self._read_at >= _EVERY_S

    def follow(self, reading: Reading) -> bool:
        """Take a reading; return whether `budget` changed."""
        self._read_at = self._clock()
        before, self._before = self._before, follow_budget(self.budget, reading)
        nearest = median_low([self.budget.bytes, before.bytes, self._before.bytes])
        if abs(nearest - self.budget.bytes) < _HYSTERESIS * self.budget.bytes:
            return False
        self.budget = before if nearest == before.bytes else self._before
        return True
