"""The end of a run: write plan, summary, samples and plots, and print the summary."""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lightning_unified.cli.config.bounded_files import printable
from lightning_unified.cli.run.json_files import versions, write_json
from lightning_unified.cli.run.parts import Parts, callback_of
from lightning_unified.cli.run.plots import draw_plots
from lightning_unified.cli.run.screen import show_summary
from lightning_unified.hardware import Reading, read

__all__ = ["finish", "objective_of", "reason_of_stop"]

_VALIDATION = "val/"
_TEST = "test/"


@runtime_checkable
class SampleWriter(Protocol):
    """A module that writes a few texts after training, for a person to look at."""

    def write_samples(self, *, seed: int) -> list[str]:
        """Return texts of the model, the same for the same weights and `seed`.

        The result is None if it cannot write any.
        """
        ...


def reason_of_stop(parts: Parts) -> str | None:
    """Return why training stopped before its end: a signal's name, or the memory pressure; None if it did not."""
    stopped_by = getattr(callback_of(parts, "GracefulInterrupt"), "signal", None)
    return getattr(callback_of(parts, "PressureGuard"), "stopped_for", None) if stopped_by is None else stopped_by.name


def finish(parts: Parts, *, config: DictConfig, directory: Path, resume_command: str, stopped: str | None) -> float:
    """Write and print the results of a run, and return the objective of a sweep.

    A stopped run skips validation, baselines and samples, so that the process ends soon. All ranks call it: they validate and test
    together, and the first one writes.
    """
    # Of the training: a validation and a test begin anew.
    plan, trained = getattr(parts.trainer.strategy, "plan", None), _summary(parts, config=config)
    validation = _validation(parts, stopped=bool(stopped))
    objective = objective_of(callback_of(parts, "RunCheckpoint"), validation)
    in_shards = any(hasattr(one, "placements") for one in parts.module.parameters())
    skips = stopped or in_shards or not parts.trainer.is_global_zero
    samples = [] if skips else _samples(parts.module, parts.callbacks.values(), seed=config.seed)
    test = None if stopped else _test(parts)  # with the weights of best.ckpt, and the samples with the last
    if not parts.trainer.is_global_zero:
        return objective
    baselines = {} if stopped else _baselines(parts.data)
    remarks = list(getattr(getattr(parts.module, "report", None), "remarks", list)())
    if in_shards and isinstance(parts.module, SampleWriter):
        remarks.append(
            "No samples were written: each rank holds a part of the model. Its commands write them from the checkpoint."
        )
    summary = trained | {
        "validation": validation | {f"{name}_perplexity": value for name, value in baselines.items()},
        "test": test,
        "objective": objective,
        "stopped": stopped,
        "resume_command": resume_command,
    }
    write_json(directory / "plan.json", _plan(plan, parts))
    write_json(directory / "summary.json", summary)
    if samples:
        (directory / "samples.txt").write_text("\n\n---\n\n".join(samples) + "\n", encoding="utf-8")
    plots = draw_plots(directory / "metrics.csv", directory / "plots")
    show_summary(
        summary,
        baselines=_named(baselines),
        samples=samples,
        saved=_saved(directory, plots=len(plots), parts=parts),
        first_step=parts.throughput.first_step,
        remarks=remarks,
    )
    return objective


def objective_of(checkpoints: Any, validation: Mapping[str, float]) -> float:
    """Return the best value of the metric that decides `best.ckpt`; NaN if there is none.

    Sweepers optimize it.

    Args:
        checkpoints: The run's `RunCheckpoint`; None, or one without a metric, stands for the last validation loss.
        validation: The metrics of the last validation, without `val/`.
    """
    monitor = getattr(checkpoints, "monitor", None)
    if monitor is None:
        return float(validation.get("loss", math.nan))
    known = [checkpoints.best_model_score, validation.get(monitor.removeprefix(_VALIDATION))]
    values = [float(value) for value in known if value is not None and not math.isnan(value)]
    return (max if checkpoints.mode == "max" else min)(values, default=math.nan)


def _samples(module: LightningModule, callbacks: Iterable[object], *, seed: int) -> list[str]:
    """Return the texts of a `SampleWriter`, else those that callbacks hold as `shown`."""
    texts = module.write_samples(seed=seed) if isinstance(module, SampleWriter) else []
    texts = texts or [text for callback in callbacks for text in getattr(callback, "shown", ())]
    return [printable(text) for text in texts]


def _validation(parts: Parts, *, stopped: bool) -> dict[str, float]:
    """Return the metrics of the last validation without `val/`.

    Validate first if the weights have changed since.
    """
    trainer = parts.trainer
    if not stopped and parts.throughput.validated_at != trainer.global_step and trainer.limit_val_batches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.validate(parts.module, datamodule=parts.data, verbose=False)
    return _metrics(parts, _VALIDATION)


def _test(parts: Parts) -> dict[str, float] | None:
    """Return the metrics on the test set, named without `test/`; None without a test set.

    The weights are those of `best.ckpt`, if there is one.

    The module then has the weights of `best.ckpt`.
    """
    trainer, rows = parts.trainer, getattr(parts.data, "test_rows", None)
    offered = is_overridden("test_dataloader", parts.data) and is_overridden("test_step", parts.module)
    if not offered or not trainer.limit_test_batches or (rows is not None and not len(rows)):
        return None
    best = getattr(callback_of(parts, "RunCheckpoint"), "best_model_path", None) or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.test(parts.module, datamodule=parts.data, ckpt_path=best, weights_only=True, verbose=False)
    return _metrics(parts, _TEST)


def _metrics(parts: Parts, prefix: str) -> dict[str, float]:
    """Return the last values of the metrics under `prefix`, without it."""
    metrics = {name: float(value) for name, value in parts.trainer.callback_metrics.items()}
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _baselines(data: LightningDataModule) -> dict[str, float]:
    """Return the baseline perplexities of the data, empty if it offers none."""
    offered = getattr(data, "baselines", None)
    return dict(offered()) if offered is not None else {}


def _named(baselines: Mapping[str, float]) -> dict[str, float]:
    return {f"Kneser–Ney {name}": value for name, value in baselines.items()}


def _summary(parts: Parts, *, config: DictConfig) -> dict[str, Any]:
    """Return `summary.json` without validation, test and resume command.

    Unknown values are None.
    """
    trainer, strategy, count = parts.trainer, parts.trainer.strategy, parts.throughput
    own_reading = getattr(strategy, "reading", None)
    reading = read(str(strategy.root_device)) if own_reading is None else own_reading()
    choice = getattr(strategy, "precision_choice", None)
    checkpoints = callback_of(parts, "RunCheckpoint")
    per_second = (lambda number: number / count.seconds) if count.seconds else (lambda _: None)
    plan, budget = getattr(strategy, "plan", None), getattr(strategy, "budget", None)
    return {
        "model": config.name,
        "parameters": parts.parameters,
        "device": getattr(strategy, "told_device", reading.device),
        "pool": reading.pool,
        "budget_bytes": None if budget is None else budget.bytes,
        "effective_batch_size": _effective(parts) or config.data.get("batch_size"),
        "micro_batch_size": getattr(strategy, "micro_batch_size", None),
        "recompute": _recompute(plan, parts.module),
        "precision": choice.precision if choice is not None else str(trainer.precision),
        "ranks": trainer.world_size,
        "steps": trainer.global_step,
        "seconds": round(count.duration, 3),
        "samples_per_second": per_second(count.samples),
        "tokens_per_second": None if count.tokens is None else per_second(count.tokens),
        "peak_bytes": {"predicted": getattr(plan, "predicted_peak_bytes", None)} | _measured_peak(parts, reading),
        "recoveries": getattr(strategy, "recoveries", None),
        "nonfinite_gradients": _nonfinite(parts),
        "validation": {},
        "test": None,
        "objective": None,
        "stopped": None,
        "checkpoint": (checkpoints.last_model_path or None) if checkpoints is not None else None,
        "resume_command": None,
        "versions": versions(),
    }


def _effective(parts: Parts) -> int | None:
    """Return the rows of a batch over all ranks, None if unknown."""
    rows = getattr(parts.trainer.strategy, "effective_batch_size", None)
    return None if rows is None else rows * parts.trainer.world_size


def _measured_peak(parts: Parts, reading: Reading) -> dict[str, Any]:
    """Return the peak that `MemoryMonitor` saw, else the device's."""
    monitor = callback_of(parts, "MemoryMonitor")
    if monitor is not None and monitor.peak is not None:
        return {"measured": monitor.peak, "source": monitor.peak_source}
    return {"measured": reading.peak.bytes, "source": reading.peak.source}


def _nonfinite(parts: Parts) -> dict[str, int] | None:
    """Return the number of optimizer steps with NaN or Inf gradients.

    None if no `GradientHealth` counted them.
    """
    health = callback_of(parts, "GradientHealth")
    if health is None:
        return None
    return {"steps": health.nonfinite_steps, "nan": health.nan_steps, "inf": health.inf_steps}


def _recompute(plan: Any, module: LightningModule) -> bool | None:
    decided = getattr(plan, "recompute", None)
    return decided if decided is not None else getattr(module, "recompute", None)


def _plan(plan: Any, parts: Parts) -> dict[str, Any]:
    """Return `plan.json`: the strategy's decisions with their reasons, and its events."""
    content = plan.to_dict() if plan is not None else {"strategy": type(parts.trainer.strategy).__name__}
    simulated = getattr(parts.trainer.strategy, "simulated", None)
    content |= {} if simulated is None else {"simulated": simulated.profile.name}
    return content | {"events": list(getattr(parts.trainer.strategy, "events", []))}


def _saved(directory: Path, *, plots: int, parts: Parts) -> list[str]:
    checkpoints = sorted(path.name for path in (directory / "checkpoints").glob("*.ckpt"))
    found = [
        name
        for name in ("config.yaml", "plan.json", "metrics.csv", "samples.txt", "summary.json")
        if (directory / name).exists()
    ]
    lines = [str(directory), f"  {', '.join(found)}"]
    if checkpoints:
        lines.append(f"  checkpoints/ {', '.join(checkpoints)}")
    if plots:
        lines.append(f"  plots/ {', '.join(sorted(path.name for path in (directory / 'plots').glob('*.png')))}")
    if any(isinstance(logger, TensorBoardLogger) for logger in parts.trainer.loggers):
        lines.append(f"  curves: tensorboard --logdir {directory}")
    return lines
