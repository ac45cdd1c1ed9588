"""The figures of a run, from the first of its files that has them; None if no file has."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_unified.cli.report.run_directory.records import Run
from lightning_unified.cli.run.metrics import Curve

__all__ = [
    "alternatives",
    "at",
    "budget_bytes",
    "budget_curve",
    "categories",
    "counts_process",
    "held",
    "measured_peak",
    "memory_curve",
    "micro_batch_size",
    "number",
    "peak_error",
    "peak_source",
    "predicted_peak",
    "prediction",
    "recoveries",
    "recovery_curve",
    "validation_figure",
    "validation_loss",
]

_OF_PROCESS = re.compile(r"VmHWM|VmRSS|ru_maxrss|resident", re.IGNORECASE)


def at(content: Any, *keys: str) -> Any:
    """Return the nested value of `content` under `keys`, None if absent."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def number(content: Any, *keys: str) -> float | None:
    """Return the number under `keys`, None if there is none."""
    value = at(content, *keys)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def memory_curve(run: Run, figure: str) -> Curve | None:
    """Return the curve of a memory figure, including simulated machines' and sampled peaks."""
    for name in (figure, f"{figure}_sampled"):
        pattern = re.compile(rf"memory(_simulated_[^/]+)?/{name}")
        found = next((curve for column, curve in run.curves.items() if pattern.fullmatch(column)), None)
        if found is not None:
            return found
    return None


def prediction(run: Run) -> Mapping[str, Any]:
    """Return the plan's prediction of a step, empty without one."""
    found = at(run.plan, "prediction")
    return found if isinstance(found, Mapping) else {}


def categories(run: Run) -> dict[str, float]:
    """Return the predicted peak by category, without empty ones."""
    found = at(prediction(run), "categories") or at(run.plan, "predicted_peak_bytes")
    return _amounts(found)


def held(run: Run) -> dict[str, float]:
    """Return the bytes by category that the run held before any activation.

    They come from the run's first event.
    """
    return _amounts(at(run.machine, "held"))


def predicted_peak(run: Run) -> float | None:
    """Return the predicted peak in bytes."""
    said = number(prediction(run), "peak_bytes")
    if said is None:
        said = sum(categories(run).values()) or number(run.summary, "peak_bytes", "predicted")
    return said


def measured_peak(run: Run) -> float | None:
    """Return the measured peak in bytes: the summary's, else the largest logged value."""
    said = number(run.summary, "peak_bytes", "measured")
    if said is not None:
        return said
    curves = [memory_curve(run, figure) for figure in ("peak", "allocated")]
    values = [value for curve in curves if curve is not None for value in curve.values if value is not None]
    return max(values, default=None)


def peak_source(run: Run) -> str:
    """Return the counter of the measured peak, "" if unknown."""
    said = at(run.summary, "peak_bytes", "source")
    return said if isinstance(said, str) else ""


def counts_process(run: Run) -> bool:
    """Return whether the measured peak is that of the whole process.

    Such a peak includes Python and libraries.
    """
    source = peak_source(run)
    return bool(_OF_PROCESS.search(source)) or (not source and at(run.machine, "device") == "cpu")


def peak_error(run: Run) -> float | None:
    """Return the prediction's relative error, positive if the prediction is too high.

    The result is None where prediction and counter differ in scope.

    The prediction is the larger of training and validation, because the measured peak covers both.
    """
    predicted, measured = predicted_peak(run), measured_peak(run)
    if predicted is None or not measured or counts_process(run):
        return None
    return max(predicted, number(prediction(run), "validation", "peak_bytes") or 0) / measured - 1


def budget_bytes(run: Run) -> float | None:
    """Return the budget in bytes; the newest where it followed other programs."""
    logged = [moment.budget_bytes for moment in run.moments if moment.budget_bytes is not None]
    said = number(run.summary, "budget_bytes")
    return logged[-1] if logged else said if said is not None else number(run.plan, "budget_bytes")


def budget_curve(run: Run) -> Curve | None:
    """Return the budget over steps, None if it never changed."""
    curve = _over_steps((moment.step, moment.budget_bytes) for moment in run.moments)
    return None if curve is None or len(set(curve.values)) < 2 else curve


def recoveries(run: Run) -> int | None:
    """Return the number of repeated steps over all parts of the run, None if unknown."""
    logged = [moment.recoveries for moment in run.moments if moment.recoveries is not None]
    said = number(run.summary, "recoveries")
    return logged[-1] if logged else None if said is None else int(said)


def recovery_curve(run: Run) -> Curve | None:
    """Return the number of recoveries over steps, None if unknown."""
    return _over_steps((moment.step, moment.recoveries) for moment in run.moments)


def _over_steps(pairs: Iterable[tuple[int | None, int | None]]) -> Curve | None:
    """Return the known values over known steps, the last value of each; None without any."""
    points = {step: float(value) for step, value in pairs if step is not None and value is not None}
    steps = tuple(sorted(points))
    return Curve(steps=steps, values=tuple(points[step] for step in steps)) if points else None


def micro_batch_size(run: Run) -> float | None:
    """Return the last micro-batch size, in rows."""
    said, curve = number(run.summary, "micro_batch_size"), memory_curve(run, "micro_batch_size")
    return said if said is not None or curve is None else curve.last


def validation_loss(run: Run) -> float | None:
    """Return the newest validation loss."""
    return validation_figure(run, "loss")


def validation_figure(run: Run, name: str) -> float | None:
    """Return the newest value of a metric of the validation, by its name without `val/`."""
    said, curve = number(run.summary, "validation", name), run.curves.get(f"val/{name}")
    return said if said is not None or curve is None else curve.last


def alternatives(run: Run) -> list[Mapping[str, Any]]:
    """Return the alternatives to the chosen plan."""
    found = at(run.plan, "alternatives")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _amounts(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        return {}
    return {str(name): value for name in found if (value := number(found, name)) is not None and value > 0}
