"""The moments of a run: events of its journal and of the pressure guard, in order."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lightning_unified.cli.report.run_directory.records import Kind, Moment

__all__ = ["read_lines", "tell"]

_RAN_OUT = "out of memory"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; skip lines that a crash truncated."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def tell(
    journal: Iterable[Mapping[str, Any]], *, pressure: Iterable[Mapping[str, Any]], listed: Sequence[str]
) -> tuple[Moment, ...]:
    """Return the moments of a run, oldest first.

    Args:
        journal: Lines of `events.jsonl`.
        pressure: Lines of `pressure.jsonl`.
        listed: The events of `plan.json`, which have no step; used only without a journal.
    """
    own = list(_of_journal(journal))
    if not own:
        own = [
            Moment(step=None, time=None, kind="recovery" if text.startswith(_RAN_OUT) else "event", text=text)
            for text in map(str, listed)
        ]
    felt = [
        Moment(step=_whole(line.get("step")), time=_text(line.get("time")), kind="pressure", text=_felt(line))
        for line in pressure
    ]
    return tuple(sorted([*own, *felt], key=lambda moment: moment.time or ""))


def _of_journal(lines: Iterable[Mapping[str, Any]]) -> Iterable[Moment]:
    """Yield one moment per line.

    Each process counts recoveries from 0, so the counts of earlier parts are added.
    """
    before = newest = 0
    for line in lines:
        kind = next((each for each in get_args(Kind) if each == line.get("kind")), None)
        if kind is None:
            continue
        if kind == "began":
            before, newest = before + newest, 0
        count = _whole(line.get("recoveries"))
        text = str(line.get("text", ""))
        if kind == "event" and (text.startswith(_RAN_OUT) or (count or 0) > newest):
            kind = "recovery"
        newest = newest if count is None else count
        yield Moment(
            step=_whole(line.get("step")),
            time=_text(line.get("time")),
            kind=kind,
            text=text,
            recoveries=None if count is None else before + count,
            budget_bytes=_whole(line.get("budget_bytes")),
        )


def _felt(line: Mapping[str, Any]) -> str:
    reasons = line.get("reasons")
    why = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return f"pressure {line.get('level', 'unknown')}: {line.get('action', '')}" + (f" ({why})" if why else "")


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
