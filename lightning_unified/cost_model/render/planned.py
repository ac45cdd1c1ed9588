"""Questions about a plan that every output format asks, such as whether it fits."""

from dataclasses import dataclass

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Candidate

__all__ = ["MachinePlan", "does_fit", "is_chosen", "least_bytes", "phase_of", "prediction_of", "recomputed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePlan:
    """Plan on one machine.

    Attributes:
        name: Name of the machine, as `simulate=` takes it.
        backend: `"cuda"`, `"rocm"`, `"mps"` or `"cpu"`.
        pool: `"dedicated"` or `"unified"`.
        budget_bytes: Bytes of its `auto` budget; None if nothing is available.
        plan: The plan; None if none could be made.
        why_not: Why there is no plan; empty if there is one.
    """

    name: str
    backend: str
    pool: str
    budget_bytes: int | None
    plan: Plan | None
    why_not: str = ""


def does_fit(plan: Plan) -> bool:
    """Return whether the plan fits; without a prediction and alternatives, it counts as fitting."""
    if plan.prediction is not None:
        return plan.prediction.step_bytes <= plan.budget_bytes
    return not plan.alternatives or any(candidate.fits for candidate in plan.alternatives)


def least_bytes(plan: Plan) -> int | None:
    """Return the least bytes any plan reserves on the device; None if unknown."""
    own = [] if plan.prediction is None else [plan.prediction.reserved_bytes]
    least = min([*own, *(candidate.reserved_bytes for candidate in plan.alternatives)], default=None)
    return least if least is None or plan.prediction is None else max(least, plan.prediction.generation_bytes)


def is_chosen(candidate: Candidate, plan: Plan) -> bool:
    """Return whether `candidate` is the plan's own choice."""
    prediction = plan.prediction
    if prediction is None or not candidate.fits:
        return False
    split = (prediction.rows, prediction.num_micro_batches)
    memory_options = (plan.precision, plan.optimizer_kernel, plan.loss_chunk, plan.attention, recomputed(plan))
    return split == (candidate.micro_batch_size, candidate.num_micro_batches) and memory_options == (
        candidate.precision,
        candidate.optimizer_kernel,
        candidate.loss_chunk,
        candidate.attention,
        candidate.recompute,
    )


def recomputed(plan: Plan) -> str:
    """Return the modules under activation checkpointing, in words."""
    return plan.recomputed or {None: "as given", True: "all", False: "none"}[plan.recompute]


def phase_of(place: str) -> str:
    """Return the phase in a place's words: `"forward"` for `"forward of network.blocks.3"`."""
    return place.partition(" of ")[0]


def prediction_of(planned: Plan | Prediction) -> Prediction | None:
    """Return the prediction of a plan, or a prediction itself."""
    return planned if isinstance(planned, Prediction) else planned.prediction
