"""Terminal output of a run: configuration and machine at the start, the summary at the end."""

import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_unified.cli.config.binding import arguments_of, target_of
from lightning_unified.cli.config.resume import Change
from lightning_unified.cli.run.machine import Machine
from lightning_unified.cli.run.parts import count_parameters
from lightning_unified.cost_model.render.facts import format_seconds
from lightning_unified.precision import live_scaler, plugin_precision
from lightning_unified.units import format_bytes

__all__ = ["quiet_third_parties", "show_changes", "show_note", "show_start", "show_summary"]

_CONSOLE = Console(highlight=False, soft_wrap=True)
_NOT_ACTIONABLE = (
    "The '.*_dataloader' does not have many workers",  # the hardware settings choose the workers, with a reason
    "The number of training batches .* is smaller than the logging interval",
    "Checkpoint directory .* exists and is not empty",  # a resumed run continues in its own directory
    "You're resuming from a checkpoint that ended before",  # the loader's position is restored
    "Trying to infer the `batch_size`",
    "Experiment logs directory .* exists",
    "isinstance\\(treespec, LeafSpec\\)",
    "`isinstance\\(treespec",
    "Found .* module\\(s\\) in eval mode",
    "There is a wandb run already",
    "Starting from v1.9.0",
)


def quiet_third_parties() -> None:
    """Hide Lightning's banners and tips, and the warnings that a user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in _NOT_ACTIONABLE:
        warnings.filterwarnings("ignore", message=f".*{pattern}")


def show_note(text: str) -> None:
    """Print one dimmed line."""
    _CONSOLE.print(escape(text), style="dim")


def show_changes(directory: Path, changes: Sequence[Change]) -> None:
    """Print the keys that differ from the continued run."""
    _CONSOLE.print(f"[bold]continuing[/bold] {escape(str(directory))}")
    for change in changes:
        _CONSOLE.print(f"  {escape(change.key)}: {escape(str(change.old))} → {escape(str(change.new))}")


def show_start(config: DictConfig, machine: Machine, *, module: LightningModule) -> None:
    """Print the machine, the budget, the changed configuration and the settings.

    The effective settings come from the Trainer that `module` is attached to, not from the request.
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for group, text in _compact(config):
        table.add_row(f"[bold]{escape(group)}[/bold]", escape(text))
    reading, budget = machine.reading, getattr(module.trainer.strategy, "budget", None)
    pool = f"{reading.name} ({reading.device}), {reading.pool} pool of {format_bytes(reading.total.bytes)}, {format_bytes(reading.available.bytes)} available"
    table.add_row("[bold]device[/bold]", escape(pool))
    kept = "none: only the unified strategies keep a budget"
    kept = kept if budget is None else f"{format_bytes(budget.bytes)} ({budget.spec}): {budget.reason}"
    table.add_row("[bold]budget[/bold]", escape(kept))
    for name, text in _used(config, machine, module.trainer):
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    table.add_row("[bold]size[/bold]", f"{count_parameters(module):,} parameters")
    _CONSOLE.print(table)


def _used(config: DictConfig, machine: Machine, trainer: Trainer) -> Iterable[tuple[str, str]]:
    """Yield settings whose effect may differ from the request.

    These are device, batch, loader, precision and scaler.
    """
    yield (
        "runs on",
        f"{trainer.strategy.root_device}, {trainer.world_size} process{'es' if trainer.world_size > 1 else ''}",
    )
    rows = config.data.get("batch_size")
    if rows is not None:
        yield "batch", f"{rows} rows for the optimizer, {config.data.get('val_batch_size') or rows} to validate"
    asked, settings = config.data.get, machine.settings
    workers, method = asked("num_workers", settings.num_workers), asked("start_method", settings.start_method)
    pinned = "on" if asked("pin_memory", settings.pin_memory) else "off"
    yield "loading", f"{workers} worker processes{f', by {method}' if workers and method else ''}, pin memory {pinned}"
    plugin = trainer.precision_plugin
    scales = "on" if live_scaler(plugin) is not None else "none"
    yield "precision", f"{plugin_precision(plugin)}, gradient scaler {scales}"


def _compact(config: DictConfig) -> Iterable[tuple[str, str]]:
    """Yield each group with its values beyond its target's defaults, on one line."""
    container = OmegaConf.to_container(config, resolve=True)
    plain = {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}
    scalars = {key: value for key, value in plain.items() if not isinstance(value, dict) and value is not None}
    yield "run", _pairs(scalars)
    for group, node in plain.items():
        if isinstance(node, dict) and "_target_" in node:
            yield group, f"{node['_target_'].rpartition('.')[2]}  {_pairs(_beyond_defaults(node))}"
        elif isinstance(node, dict):
            named = {
                name: member["_target_"].rpartition(".")[2]
                for name, member in node.items()
                if isinstance(member, dict) and "_target_" in member
            }
            yield group, ", ".join(named.values()) or _pairs(node)


def _beyond_defaults(node: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: parameter.default for name, parameter in arguments_of(target_of(node["_target_"])).items()}
    return {
        key: value
        for key, value in node.items()
        if not key.startswith("_") and not isinstance(value, dict) and defaults.get(key) != value
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """Return `values` as overrides, with null, true and false."""
    return " ".join(
        f"{key}={json.dumps(value) if value is None or isinstance(value, bool) else value}"
        for key, value in values.items()
    )


def show_summary(
    summary: Mapping[str, Any],
    *,
    baselines: Mapping[str, float],
    samples: Sequence[str],
    saved: Sequence[str],
    first_step: int = 0,
) -> None:
    """Print the summary of a run that started at `first_step`."""
    table = Table(
        title="Summary",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name, text in _rows(summary, baselines, first_step):
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    _CONSOLE.print()
    _CONSOLE.print(table)
    if samples:
        _CONSOLE.print("\n[bold]Samples of its text[/bold]")
        for sample in samples:
            _CONSOLE.print(escape("  " + sample.strip().replace("\n", "\n  ")))
            _CONSOLE.print("  ·", style="dim")
    _CONSOLE.print("\n[bold]Saved[/bold]")
    for line in saved:
        _CONSOLE.print("  " + escape(line))
    _CONSOLE.print(f"[bold]Go on with[/bold] {escape(str(summary['resume_command']))}")


def _rows(summary: Mapping[str, Any], baselines: Mapping[str, float], first_step: int) -> Iterable[tuple[str, str]]:
    effective, micro = summary["effective_batch_size"], summary["micro_batch_size"]
    is_whole = micro is None or (effective is not None and micro >= effective)
    split = "one micro-batch" if is_whole else f"micro-batches of up to {micro} rows"
    yield "model", f"{summary['model']}, {summary['parameters']:,} parameters, {summary['precision']}"
    yield (
        "batch",
        f"{effective} rows, {split}"
        + (f"; {summary['recoveries']} recoveries from lack of memory" if summary["recoveries"] else ""),
    )
    peak = summary["peak_bytes"]
    predicted = f", {format_bytes(peak['predicted'])} predicted," if peak.get("predicted") is not None else ""
    yield (
        "memory",
        f"peak {format_bytes(peak['measured'])} ({peak['source']}){predicted}"
        + ("" if summary["budget_bytes"] is None else f" of a budget of {format_bytes(summary['budget_bytes'])}"),
    )
    tokens, rows = summary["tokens_per_second"], summary["samples_per_second"]
    since = f" since step {first_step}" if first_step else ""
    speed = [
        f"{rate:,.{digits}f} {unit}/s" for rate, digits, unit in ((tokens, 0, "tokens"), (rows, 1, "samples")) if rate
    ]
    steps, seconds = summary["steps"] - first_step, summary["seconds"]
    each = f" ({format_seconds(seconds / steps)}/step)" if steps else ""
    yield (
        "speed",
        f"{steps} steps{since} in {format_seconds(seconds)}{each}" + "".join(f", {text}" for text in speed),
    )
    validation = summary["validation"]
    if "loss" in validation:
        perplexity, accuracy = validation.get("perplexity"), validation.get("accuracy")
        yield (
            "validation",
            f"loss {validation['loss']:.4f}"
            + (f", perplexity {perplexity:.1f}" if perplexity is not None else "")
            + (f", accuracy {accuracy:.4f}" if accuracy is not None else ""),
        )
    for name, perplexity in baselines.items():
        yield name, f"perplexity {perplexity:.1f} over the same tokens"
