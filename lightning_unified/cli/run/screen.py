"""Terminal output of a run: configuration and machine at the start, the summary at the end."""

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from lightning_unified.cli.config.resume import Change
from lightning_unified.cli.run.machine import Machine
from lightning_unified.cli.run.parts import count_parameters
from lightning_unified.hardware import Budget
from lightning_unified.precision import live_scaler, plugin_precision
from lightning_unified.terminal import is_first_process, say, wrapped
from lightning_unified.units import format_bytes, format_duration

__all__ = ["batches_of", "quiet_third_parties", "show_changes", "show_data", "show_note", "show_start", "show_summary"]

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

_FIGURES = {  # metric: its name on the screen, its format
    "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".1f"),
    "accuracy": ("accuracy", ".4f"),
    "macro_f1": ("macro-F1", ".4f"),
    "win_rate": ("win rate", ".3f"),
}


def quiet_third_parties() -> None:
    """Hide Lightning's banners and tips, and the warnings that a user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in _NOT_ACTIONABLE:
        warnings.filterwarnings("ignore", message=f".*{pattern}")
    if not is_first_process():  # the first rank says what concerns all
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning_unified").setLevel(logging.ERROR)


def show_note(text: str) -> None:
    """Print one dimmed line."""
    _show(Text(text, style="dim"))


def show_changes(directory: Path, changes: Sequence[Change]) -> None:
    """Print the keys that differ from the continued run."""
    lines = [Text.assemble(("continuing ", "bold"), str(directory))]
    _show(*lines, *(Text(f"  {change.key}: {change.old} → {change.new}") for change in changes))


def show_start(config: DictConfig, machine: Machine, *, module: LightningModule, given: Sequence[str] = ()) -> None:
    """Print what runs and how it uses the machine, in at most ten lines.

    `config.yaml` holds all settings.

    The effective settings come from the Trainer that `module` is attached to, not from the request.
    """
    trainer, rows = module.trainer, config.data.get("batch_size")
    facts = [("run", f"{config.get('name')}, seed {config.get('seed')}, all settings in {_config_file(config)}")]
    if given:
        facts.append(("given", _shortened(" ".join(given))))
    plugin = trainer.precision_plugin
    scaler = ", gradient scaler on" if live_scaler(plugin) is not None else ""
    size = f"{count_parameters(module):,} parameters, {plugin_precision(plugin)}{scaler}"
    facts.append(("model", f"{type(module).__name__}, {size}"))
    if rows is not None:
        validation = config.data.get("val_batch_size") or rows
        facts.append(("batch", f"{rows} rows for the optimizer, {validation} to validate"))
    facts += [
        ("loading", _loading(config, machine)),
        ("device", _device(machine, trainer)),
        ("budget", _budget(getattr(trainer.strategy, "budget", None))),
    ]
    _show(_facts(facts))


def show_data(data: object, callbacks: Iterable[object], *, batches: str) -> None:
    """Print a line about the data, and one of each callback that describes itself.

    Args:
        data: The data module; its `describe_line()`, if it has one, returns the line.
        callbacks: Likewise.
        batches: The line of a data module that describes nothing.
    """
    own = getattr(data, "describe_line", None)
    lines = [Text.assemble(("data ", "bold"), str(own() if callable(own) else batches))]
    for one in callbacks:
        describe = getattr(one, "describe_line", None)
        if callable(describe) and (line := describe()):
            lines.append(Text(str(line)))
    _show(*lines)


def batches_of(trainer: Trainer) -> str:
    """Return the batches of an epoch and of a validation in words, where the loaders know them."""
    kinds = {"to train": trainer.num_training_batches, "to validate": sum(trainer.num_val_batches)}
    known = [f"{int(count):,} batches {kind}" for kind, count in kinds.items() if math.isfinite(count)]
    return ", ".join(known) or "a stream of unknown length"


def _config_file(config: DictConfig) -> str:
    directory = str(config.get("run_dir"))
    relative = os.path.relpath(directory)
    return str(Path(directory if relative.startswith("..") else relative) / "config.yaml")


def _loading(config: DictConfig, machine: Machine) -> str:
    asked, settings = config.data.get, machine.settings
    workers, method = asked("num_workers", settings.num_workers), asked("start_method", settings.start_method)
    pinned = "on" if asked("pin_memory", settings.pin_memory) else "off"
    how = f"{workers} worker processes{f', by {method}' if workers and method else ''}, pin memory {pinned}"
    return f"{how} ({machine.workers.reason})" if workers == machine.workers.count else how


def _device(machine: Machine, trainer: Trainer) -> str:
    reading = machine.reading
    processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    amount = f"{format_bytes(reading.available.bytes)} of {format_bytes(reading.total.bytes)} available"
    return f"{trainer.strategy.root_device} ({reading.name}){processes}, {amount}"


def _budget(budget: Budget | None) -> str:
    if budget is None:
        return "none: only the unified strategies keep a budget"
    return f"{format_bytes(budget.bytes)} ({budget.spec}): {budget.reason}"


def _facts(facts: Iterable[tuple[str, str]]) -> Text:
    """Return a line for each named fact; long ones are wrapped at words."""
    facts = list(facts)
    column = max((len(name) for name, _ in facts), default=0) + 2
    lines = []
    for name, text in facts:
        first, *rest = wrapped(text, max(30, _CONSOLE.width - column))
        lines.append(Text.assemble((name.ljust(column), "bold"), first))
        lines += [Text(" " * column + line) for line in rest]
    return Text("\n").join(lines)


def _shortened(text: str) -> str:
    width = max(30, _CONSOLE.width - 9)  # beside the column of names
    return text if len(text) <= width else text[: width - 1] + "…"


def _show(*parts: Text) -> None:
    """Print `parts` in one write, so that runs which share a terminal do not mix their lines.

    Only the first of several ranks prints.
    """
    if not is_first_process():
        return
    with _CONSOLE.capture() as shown:
        for part in parts:
            _CONSOLE.print(part)
    say(shown.get())


def show_summary(
    summary: Mapping[str, Any],
    *,
    baselines: Mapping[str, float],
    samples: Sequence[str],
    saved: Sequence[str],
    first_step: int = 0,
    remarks: Sequence[str] = (),
) -> None:
    """Print the summary of a run that started at `first_step`."""
    parts = [Text(), Text("Summary", style="bold"), _facts(_rows(summary, baselines, first_step))]
    parts += [Text(remark) for remark in remarks]
    if samples:
        parts += [Text(), Text("Samples of its text", style="bold")]
        for sample in samples:
            parts += [Text("  " + sample.strip().replace("\n", "\n  ")), Text("  ·", style="dim")]
    parts += [Text(), Text("Saved", style="bold"), *(Text(f"  {line}") for line in saved)]
    _show(*parts, Text.assemble(("Go on with ", "bold"), str(summary["resume_command"])))


def _figures(metrics: Mapping[str, float]) -> str:
    """Return the metrics that a person judges a model by, those of `_FIGURES` that were logged."""
    known = [(name, form, metrics.get(key)) for key, (name, form) in _FIGURES.items()]
    return ", ".join(f"{name} {value:{form}}" for name, form, value in known if value is not None)


def _rows(summary: Mapping[str, Any], baselines: Mapping[str, float], first_step: int) -> Iterable[tuple[str, str]]:
    effective, micro, ranks = (summary[key] for key in ("effective_batch_size", "micro_batch_size", "ranks"))
    is_whole = micro is None or (effective is not None and micro * ranks >= effective)
    split = "one micro-batch" if is_whole else f"micro-batches of up to {micro} rows"
    split += f" on each of {ranks} ranks" if ranks > 1 else ""
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
    each = f" ({format_duration(seconds / steps)}/step)" if steps else ""
    yield (
        "speed",
        f"{steps} steps{since} in {format_duration(seconds)}{each}" + "".join(f", {text}" for text in speed),
    )
    bad = summary.get("nonfinite_gradients")
    if bad is not None:
        counted = f"{bad['steps']} steps with NaN ({bad['nan']}) or Inf ({bad['inf']})"
        yield "gradients", counted if bad["steps"] else "finite in every step"
    for side in ("validation", "test"):
        if figures := _figures(summary.get(side) or {}):
            yield side, figures
    for name, perplexity in baselines.items():
        yield name, f"perplexity {perplexity:.1f} over the same tokens"
