"""A run as its directory tells of it. What the directory does not tell is None, empty or absent, never 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Curve", "Kind", "Moment", "Run"]

Kind = Literal["began", "recovery", "event", "pressure", "ended", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A logged metric over optimizer steps; a value that was not finite is None.

    Attributes:
        steps: As they were logged, growing.
        values: One for each step.
    """

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def last(self) -> float | None:
        """The newest finite value."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Something that happened on the way.

    Attributes:
        step: Optimizer steps done by then; None where nobody wrote it down.
        time: ISO 8601; None likewise.
        kind: A `recovery` is a step that was repeated for lack of memory; `pressure` is the guard's.
        text: For people.
        recoveries: Of the whole run so far, resumed parts added up; None where it is unknown.
        budget_bytes: What the run could use then; None likewise.
    """

    step: int | None
    time: str | None
    kind: Kind
    text: str
    recoveries: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that a run directory holds for a reader.

    Attributes:
        name: Short, and its own among the runs of a page.
        directory: Where it is.
        status: How it stands, in words.
        well: Whether it ended as it should; None while that is unknown.
        summary: `summary.json`, empty without one.
        plan: `plan.json`, empty without one.
        config: `config.yaml`, empty without one.
        overrides: What was given on the command line.
        machine: What the newest part of the run began with, from `events.jsonl`.
        curves: `metrics.csv` by column.
        moments: What happened, in order.
        problems: Files that are there and cannot be read, in words.
    """

    name: str
    directory: Path
    status: str
    well: bool | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    moments: tuple[Moment, ...] = ()
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "directory": str(self.directory),
            "status": self.status,
            "well": self.well,
            "summary": self.summary,
            "plan": self.plan,
            "config": self.config,
            "overrides": list(self.overrides),
            "machine": self.machine,
            "curves": {
                name: {"steps": curve.steps, "values": curve.values} for name, curve in sorted(self.curves.items())
            },
            "moments": [
                {"step": moment.step, "time": moment.time, "kind": moment.kind, "text": moment.text}
                for moment in self.moments
            ],
            "problems": list(self.problems),
        }
