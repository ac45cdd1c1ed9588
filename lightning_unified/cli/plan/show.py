"""Show a plan: on the terminal or as JSON, and also as Markdown and as a picture."""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_unified.cli.plan.arguments import Asked
from lightning_unified.cli.plan.subject import Subject
from lightning_unified.cli.plan.target_machine import Target
from lightning_unified.cost_model.generation import Generated
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.render import (
    MachinePlan,
    does_fit,
    least_bytes,
    sheet_of,
    to_markdown,
    to_png,
    to_terminal,
)
from lightning_unified.cost_model.render.planned import recomputed
from lightning_unified.cost_model.render.tables import generation_table
from lightning_unified.errors import ConfigurationError
from lightning_unified.units import format_bytes

__all__ = ["Page", "page_console", "waiting"]

_PIPE_WIDTH = 140


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The output of the command.

    Attributes:
        subject: The planned module, trainer and batch.
        target: The machine.
        plan: The plan.
        machines: The plans of other machines.
        generation: The memory of a generation, if requested.
    """

    subject: Subject
    target: Target
    plan: Plan
    machines: tuple[MachinePlan, ...] = ()
    generation: Generated | None = None

    def show(self, asked: Asked, console: Console) -> int:
        """Print the page and write the requested files; return 0, or 1 if nothing fits."""
        common: dict[str, Any] = {"title": self.title, "watermarks": self.target.marks}
        budget, generation = self.target.budget.bytes, self.generation
        more = [] if generation is None else [generation_table(generation, budget_bytes=budget)]
        sheet = sheet_of(self.plan, **common, facts=self.facts, machines=self.machines, more=more)
        if asked.markdown is not None:
            _write(asked.markdown, to_markdown(sheet))
        if asked.png is not None:
            to_png(self.plan, asked.png, **common)
        if asked.json:
            sys.stdout.write(json.dumps(self.as_json(), indent=2) + "\n")
        else:
            console.print(to_terminal(sheet))
        if does_fit(self.plan):
            return 0
        sys.stderr.write(f"error: {self.refusal}\n")
        return 1

    @property
    def title(self) -> str:
        """The title of the page."""
        where = self.target.name or f"this machine's {self.target.backend}"
        if self.plan.devices > 1:
            where = f"one of {self.plan.devices} devices, {where}"
        return f"{self.subject.name} on {where}"

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """Model, batch and machine, shown before the plan."""
        return (
            ("model", self.subject.description),
            ("batch", self.subject.batch_description),
            ("machine", self.target.description),
            *([("devices", self._devices)] if self.plan.devices > 1 else []),
        )

    @property
    def _devices(self) -> str:
        """The devices, their strategy and their batches in one line."""
        devices, rows = self.plan.devices, self.subject.rows
        batches = "a batch each" if rows is None else f"a batch of {rows} rows each, {devices * rows} rows in all"
        strategy = f"{self.plan.strategy}{f', hold={self.plan.hold}' * bool(self.plan.hold)}"
        return f"{devices} with {strategy}; {batches}; budget and figures are of one device"

    @property
    def refusal(self) -> str:
        """Why no plan fits, and what to change."""
        least = least_bytes(self.plan)
        need = "" if least is None else f": the smallest step found takes {format_bytes(least)}"
        return (
            f"{self.subject.name} does not fit into {format_bytes(self.target.budget.bytes)}{need}. Raise memory.budget, shorten "
            "the batch's rows, or find a larger machine with --fits-where."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the keys that scripts rely on, in bytes and seconds; null for unknown values."""
        marks = self.target.marks
        return {
            "model": self.subject.name,
            "module": type(self.subject.module).__name__,
            "parameters": self.subject.parameters,
            "batch": self.subject.batch_description,
            "effective_batch_size": None if self.subject.rows is None else self.subject.rows * self.plan.devices,
            "machine": self.target.name,
            "device": self.target.backend,
            "pool": self.target.reading.pool,
            "devices": self.plan.devices,
            "strategy": self.plan.strategy or None,
            "hold": self.plan.hold or None,
            "budget_bytes": self.target.budget.bytes,
            "watermarks": {"low": marks.low, "high": marks.high},
            "fits": does_fit(self.plan),
            "plan": self.plan.to_dict(),
            "generation": None if self.generation is None else self.generation.to_dict(),
            "machines": {machine.name: _machine(machine) for machine in self.machines},
        }


def _machine(machine: MachinePlan) -> dict[str, Any]:
    plan = machine.plan
    prediction = None if plan is None else plan.prediction
    return {
        "device": machine.backend,
        "pool": machine.pool,
        "budget_bytes": machine.budget_bytes,
        "fits": None if plan is None and not machine.why_not else plan is not None and does_fit(plan),
        "micro_batch_size": None if plan is None else plan.micro_batch_size,
        "recompute": None if plan is None else plan.recompute,
        "recomputed": None if plan is None or prediction is None else recomputed(plan),
        "precision": None if plan is None else plan.precision,
        "peak_bytes": None if prediction is None else prediction.peak_bytes,
        "reserved_bytes": None if prediction is None else prediction.reserved_bytes,
        "seconds": None if prediction is None else prediction.seconds,
        "why_not": machine.why_not or None,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--markdown {path} cannot be written: {error.strerror or error}; name a file that can."
        ) from error


def page_console() -> Console:
    """Return a console on standard output.

    A file or a pipe gets a width in which the tables fit.
    """
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=_PIPE_WIDTH)


def waiting(doing: str) -> AbstractContextManager[Any]:
    """Return a context that shows an activity on standard error of a terminal.

    Notebook kernels set FORCE_COLOR, so that rich takes a file for a terminal.
    """
    return Console(stderr=True).status(f"{doing} …") if sys.stderr.isatty() else nullcontext()
