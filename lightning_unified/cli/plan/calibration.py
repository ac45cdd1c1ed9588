"""What measured steps have corrected on this machine: shown, or forgotten."""

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from lightning_unified.planning.render.facts import format_seconds

__all__ = ["calibration"]


def calibration(asked: Literal["show", "clear"], *, as_json: bool, console: Console | None = None) -> int:
    """Show what is kept of the machines that steps were measured on, or delete it; return 0.

    Args:
        asked: What to do.
        as_json: Print JSON for scripts, and nothing else.
        console: Where to print; default the terminal.
    """
    from lightning_unified.planning.calibration import (
        Calibration,
        cache_directory,
        calibrated_machines,
        clear_calibrations,
    )

    console = console or Console()
    folder = cache_directory()
    if asked == "clear":
        cleared = clear_calibrations()
        said = {"directory": None if folder is None else str(folder), "cleared": cleared}
        text = f"forgotten: {', '.join(cleared)}" if cleared else f"nothing to forget: {folder} holds no calibration"
    else:
        kept = {name: Calibration.load(name).to_dict() for name in calibrated_machines()}
        said = {"directory": None if folder is None else str(folder), "machines": kept}
        text = (
            f"{len(kept)} machine{'s' * (len(kept) != 1)} in {folder}" if kept else f"nothing is kept yet in {folder}"
        )
    if as_json:
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
        return 0
    console.print(text, highlight=False, markup=False)
    for name, figures in said.get("machines", {}).items() if isinstance(said.get("machines"), dict) else ():
        console.print(_table(name, figures))
    return 0


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    """Return one machine: its speeds with where they come from, and measured over predicted peaks and times by kind."""
    table = Table(
        title=name, title_justify="left", title_style="bold not italic", header_style="dim", box=None, pad_edge=False
    )
    for column in ("figure", "value", "from"):
        table.add_column(column, overflow="fold")
    rates = figures.get("rates") or {}
    sources = rates.get("sources") or {}
    for dtype, rate in (rates.get("flops") or {}).items():
        table.add_row(
            f"{dtype} products", f"{rate / 1e12:.3g} TFLOP/s", str(sources.get(dtype, sources.get("flops", "")))
        )
    if rates:
        table.add_row("memory", f"{rates['bandwidth'] / 1e9:.3g} GB/s", str(sources.get("bandwidth", "")))
        table.add_row("an operation", format_seconds(rates["launch"]), str(sources.get("launch", "")))
    for title, key in (("peak", "peaks"), ("step", "steps")):
        for kind, ratios in (figures.get(key) or {}).items():
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios[-4:])
            table.add_row(f"{title}, {kind}", shown, f"measured over predicted, newest last of {len(ratios)}")
    return table
