"""`plan --calibration`: show or delete the corrections that measured steps left for each machine."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from lightning_unified.cli.plan.show import page_console
from lightning_unified.cost_model.rates import Alignment
from lightning_unified.cost_model.rates.calibration import (
    Calibration,
    cache_directory,
    calibrated_machines,
    clear_calibrations,
)
from lightning_unified.units import format_duration

__all__ = ["clear_calibration", "show_calibration"]


def show_calibration(*, as_json: bool) -> int:
    """Print the calibration of every measured machine; return 0."""
    folder, kept = cache_directory(), {name: Calibration.load(name).to_dict() for name in calibrated_machines()}
    if as_json:
        _print_json(machines=kept)
        return 0
    console = page_console()
    many = f"{len(kept)} machine{'s' * (len(kept) != 1)}"
    console.print(f"{many} in {folder}" if kept else f"nothing is kept yet in {folder}", highlight=False, markup=False)
    for name, figures in kept.items():
        console.print(_table(name, figures))
    return 0


def clear_calibration(*, as_json: bool) -> int:
    """Delete the calibrations of all machines, and print their names; return 0."""
    cleared = clear_calibrations()
    if as_json:
        _print_json(cleared=cleared)
    elif cleared:
        sys.stdout.write(f"forgotten: {', '.join(cleared)}\n")
    else:
        sys.stdout.write(f"nothing to forget: {cache_directory()} holds no calibration\n")
    return 0


def _print_json(**found: Any) -> None:
    folder = cache_directory()
    sys.stdout.write(json.dumps({"directory": None if folder is None else str(folder), **found}, indent=2) + "\n")


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    """Return a table of one machine's speeds, with their sources.

    It has measured over predicted peaks and times by kind.
    """
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
        table.add_row("memory", f"{rates['bandwidth'] / 1e9:,.0f} GB/s", str(sources.get("bandwidth", "")))
        table.add_row("an operation", format_duration(rates["launch"]), str(sources.get("launch", "")))
    if figures.get("alignment"):
        alignment = Alignment.from_dict(figures["alignment"])
        pays = "pays nothing" if alignment.multiple == 1 else f"× {alignment.gain:.2f} without"
        table.add_row("alignment", pays, f"{alignment.describe()}; {alignment.source}")
    for title, key in (("peak", "peaks"), ("step", "steps")):
        for kind, ratios in (figures.get(key) or {}).items():
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios[-4:])
            table.add_row(f"{title}, {kind}", shown, f"measured over predicted, newest last of {len(ratios)}")
    return table
