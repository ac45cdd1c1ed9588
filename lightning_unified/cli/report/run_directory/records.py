"""Records of a run directory. Missing values are None, empty or absent, never 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_unified.cli.run.metrics import Curve

__all__ = ["Kind", "Moment", "Run"]

Kind = Literal["began", "recovery", "event", "pressure", "ended", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An event of a run.

    Attributes:
        step: Optimizer steps done at that time, None if unknown.
        time: ISO 8601, None if unknown.
        kind: `recovery` is a step repeated after memory ran out; `pressure` comes from the guard.
        text: The event in words.
        recoveries: Recoveries of the whole run so far, over all resumed parts; None if unknown.
        budget_bytes: The budget at that time, None if unknown.
    """

    step: int | None
    time: str | None
    kind: Kind
    text: str
    recoveries: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The contents of a run directory.

    Attributes:
        name: A short name, unique among the runs of a page.
        directory: The run directory.
        status: The status in words.
        well: Whether the run ended well; None if unknown.
        summary: `summary.json`, empty without one.
        plan: `plan.json`, empty without one.
        config: `config.yaml`, empty without one.
        overrides: The overrides of the command line.
        machine: The machine of the newest part of the run, from `events.jsonl`.
        curves: `metrics.csv` by column.
        moments: Events, in order.
        samples: `samples.txt`, empty without one.
        problems: Files that exist and cannot be read, in words.
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
    samples: str = ""
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
            "samples": self.samples,
            "problems": list(self.problems),
        }
