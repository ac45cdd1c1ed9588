"""A plan in words: decisions, reasons and confidence."""

from collections.abc import Iterator

from lightning_unified.cost_model.candidates import describe_split
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.planned import does_fit, recomputed
from lightning_unified.cost_model.render.sheet import Fact
from lightning_unified.cost_model.trace.trace import Confidence
from lightning_unified.units import format_bytes, format_duration

__all__ = ["facts_of_plan", "facts_of_prediction", "format_share"]

_CONFIDENCE: dict[Confidence, str] = {
    "high": "no value was made up: every shape of the step is known",
    "medium": "made-up values decide no shape",
    "low": "a made-up value can decide a shape, so the real step may differ; run a batch-size probe before you rely on it",
}
_SHOWN = {"budget", "micro_batch_size", "recompute", "precision", "optimizer_kernel", "loss_chunk", "attention"}


def facts_of_plan(plan: Plan) -> Iterator[Fact]:
    """Yield each decision with its reason, then the prediction.

    A plan that does not fit yields its verdict first.
    """
    why = plan.reasons
    if not does_fit(plan):
        yield Fact(name="verdict", text="does not fit", why=why.get("micro_batch_size", ""))
        yield Fact(name="budget", text=format_bytes(plan.budget_bytes), why=why.get("budget", ""))
        yield Fact(name="precision", text=plan.precision, why=why.get("precision", ""))
        return
    yield Fact(name="budget", text=format_bytes(plan.budget_bytes), why=why.get("budget", ""))
    yield Fact(name="micro-batch", text=_micro_batch(plan), why=why.get("micro_batch_size", ""))
    yield Fact(name="recompute", text=recomputed(plan), why=why.get("recompute", ""))
    yield Fact(name="precision", text=plan.precision, why=why.get("precision", ""))
    if plan.optimizer_kernel is not None:
        yield Fact(name="optimizer", text=f"{plan.optimizer_kernel} kernel", why=why.get("optimizer_kernel", ""))
    if plan.loss_chunk is not None:
        yield Fact(name="loss", text=f"in chunks of {plan.loss_chunk}", why=why.get("loss_chunk", ""))
    if plan.attention is not None:
        yield Fact(name="attention", text=f"{plan.attention}", why=why.get("attention", ""))
    for name, reason in why.items():
        if name not in _SHOWN and reason:
            yield Fact(name=name.replace("_", " "), text=reason)
    if plan.prediction is not None:
        yield from facts_of_prediction(plan.prediction, budget_bytes=plan.budget_bytes)


def facts_of_prediction(prediction: Prediction, *, budget_bytes: int | None = None) -> Iterator[Fact]:
    """Yield peak, place, time and confidence."""
    of_budget = "" if not budget_bytes else f", {format_share(prediction.reserved_bytes / budget_bytes)} of the budget"
    taken = f"{format_bytes(prediction.reserved_bytes)} with the allocator's rounding and caches{of_budget}"
    yield Fact(name="peak", text=f"{format_bytes(prediction.peak_bytes)} of tensors; {taken}")
    yield Fact(name="where", text=prediction.instant)
    if prediction.seconds is not None:
        sampling = prediction.generation_seconds
        of_it = f", {format_duration(sampling)} of them for sampling before it" if sampling else ""
        busy = prediction.link_seconds
        link = (
            ""
            if busy is None
            else f", the link busy for {format_duration(busy)} with {format_bytes(prediction.sent_bytes)} sent"
        )
        yield Fact(name="step", text=f"{format_duration(prediction.seconds)} predicted{of_it}{link}")
    yield Fact(name="confidence", text=prediction.confidence, why=_CONFIDENCE[prediction.confidence])


def format_share(share: float) -> str:
    """Format a share: `"0.4 %"`, `"66 %"`, `"120 %"`, `"28 ×"`."""
    if share >= 10:
        return f"{share:.0f} ×"
    return f"{share:.1%}".replace("%", " %") if share < 0.1 else f"{share:.0%}".replace("%", " %")


def _micro_batch(plan: Plan) -> str:
    if plan.micro_batch_size is None:
        return "the whole batch at once"
    if plan.prediction is None:
        return f"micro-batches of up to {plan.micro_batch_size} row{'s' * (plan.micro_batch_size != 1)}"
    return describe_split(plan.micro_batch_size, plan.prediction.num_micro_batches)
