"""What is rendered: a plan or a prediction, as far as its readers look at it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_unified.planning.prediction import Prediction

__all__ = ["Alternative", "MachinePlan", "Planned", "does_fit", "is_chosen", "parts_of", "phase_of", "prediction_of"]


class Alternative(Protocol):
    """A plan that was weighed: what it would pull, take and last; `seconds` is None where no rate is known.

    The attributes are those of `planning.search.Candidate`.
    """

    @property
    def micro_batch_size(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def recompute(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer_kernel(self) -> str | None: ...
    @property
    def loss_chunk(self) -> int | None: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def fits(self) -> bool: ...


class Planned(Protocol):
    """A plan with what it is predicted to take, and what else was weighed; the attributes are those of `Plan`."""

    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def recompute(self) -> bool | None: ...
    @property
    def recompute_blocks(self) -> int | str | None: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer_kernel(self) -> str | None: ...
    @property
    def loss_chunk(self) -> int | None: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def reasons(self) -> Mapping[str, str]: ...
    @property
    def prediction(self) -> Prediction | None: ...
    @property
    def alternatives(self) -> Sequence[Alternative]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePlan:
    """What one machine would do.

    Attributes:
        name: Of the machine, as `simulate=` takes it.
        backend: `"cuda"`, `"rocm"`, `"mps"` or `"cpu"`.
        pool: `"dedicated"` or `"unified"`.
        budget_bytes: What its `auto` budget comes to; None where nothing can be had.
        plan: What was found; None where there was nothing to plan with.
        why_not: Why there is no plan; empty where there is one.
    """

    name: str
    backend: str
    pool: str
    budget_bytes: int | None
    plan: Planned | None
    why_not: str = ""


def phase_of(place: str) -> str:
    """Return the phase that a place's words name, `"forward"` for `"forward of network.blocks.3"`."""
    return place.partition(" of ")[0]


def is_chosen(alternative: Alternative, plan: Planned) -> bool:
    """Return whether `alternative` is what `plan` decided on."""
    prediction = plan.prediction
    if prediction is None or not alternative.fits:
        return False
    levers = (plan.precision, plan.optimizer_kernel, plan.loss_chunk)
    return (alternative.micro_batch_size, alternative.peak_bytes) == (prediction.rows, prediction.peak_bytes) and (
        alternative.precision,
        alternative.optimizer_kernel,
        alternative.loss_chunk,
    ) == levers


def parts_of(plan: Planned) -> int | None:
    """Return in how many micro-batches a batch runs; a prediction alone may be of the first few, after which all are alike."""
    chosen = next((each for each in plan.alternatives if is_chosen(each, plan)), None)
    if chosen is not None:
        return chosen.parts
    return None if plan.prediction is None else plan.prediction.parts


def prediction_of(planned: Planned | Prediction) -> Prediction | None:
    """Return the prediction of a plan, or a prediction itself."""
    return planned if isinstance(planned, Prediction) else planned.prediction


def does_fit(plan: Planned) -> bool:
    """Return whether what is planned fits: what the allocator takes is within the budget. Without a prediction, what was weighed tells."""
    if plan.prediction is not None:
        return plan.prediction.reserved_bytes <= plan.budget_bytes
    return not plan.alternatives or any(alternative.fits for alternative in plan.alternatives)
