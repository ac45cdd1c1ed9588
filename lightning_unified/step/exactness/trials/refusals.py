"""Errors of trials and their messages: each names the module, the difference, and the ways out."""

from collections.abc import Collection, Sequence
from math import isfinite
from typing import Any, get_args

import numpy as np
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import NamedMerge

__all__ = [
    "EVALUATION_HOOKS",
    "failure_on_rows",
    "refusal_of_existence",
    "refusal_of_gradients",
    "refusal_of_predictions",
    "refusal_of_proportion",
    "refusal_of_renormed",
    "refusal_of_state",
    "refusal_of_switches",
    "refusal_of_updates",
    "refusal_of_writes",
    "unsplit",
]


def refusal_of_proportion(whose: str, *, of_summands: bool = False) -> SplitError:
    """Return the error for a backward pass that is not proportional to the loss, on ranks that hold shards.

    Args:
        whose: The name of the module's class.
        of_summands: Whether summands of the loss have weights of their own, instead of such ranks.
    """
    if of_summands:
        return SplitError(
            f"{whose} has a backward pass that is not proportional to its loss: a gradient hook adds to a gradient or keeps it, or a function of autograd "
            "has a gradient of its own. Its loss is a sum of means over different terms, so that its batches cannot be split. Do without such a hook or function, "
            "or declare MicroBatchRules(splittable=False) to run batches whole."
        )
    return SplitError(
        f"{whose} has a backward pass that is not proportional to its loss: a gradient hook adds to a gradient or keeps it, or a function of autograd has "
        'a gradient of its own. Ranks that hold shards cannot split its batches. Give UnifiedFSDPStrategy(hold="parameters"), or declare '
        "MicroBatchRules(splittable=False) to run batches whole."
    )


def refusal_of_gradients(
    whose: str,
    rows: int,
    differences: dict[str, float],
    *,
    parameter: str,
    not_replayed: str,
    not_finite: Sequence[int] = (),
    is_skipped: bool = False,
    initialized: Sequence[str] = (),
    summands: Sequence[str] = (),
) -> str:
    """Return the error message for gradients that no loss rule makes agree.

    Args:
        whose: The name of the module's class.
        rows: The number of rows that ran.
        differences: The relative difference of the gradients under each loss rule, by its name.
        parameter: The parameter with the largest difference.
        not_replayed: Why random draws could not be replayed; empty if they were, or the step draws none.
        not_finite: The rows of each micro-batch whose gradient is not finite.
        is_skipped: Whether the step returned None for all rows, and a loss for some micro-batches.
        initialized: Parameters that the step set before their first use, to other values for other rows.
        summands: The names of the loss's summands, none of whose weights agree.
    """
    tried = "; ".join(
        f"{name}: {one:.1e}" if isfinite(one) else f"{name}: not finite" for name, one in differences.items()
    )
    divides = (
        f" A micro-batch of {_counted(min(not_finite), 'row')} has a gradient that is not finite: the step divides by a number that is 0 there, such as a "
        "standard deviation of one row, or a count of some rows."
        if not_finite
        else ""
    )
    skips = (
        " training_step returned None for all of these rows, and a loss for some micro-batches: it skips a batch for some of its rows, such as one with a "
        "missing value. Leave these rows out of the loss instead, or skip the batch in the data loader."
        if is_skipped
        else ""
    )
    sets = (
        f" The step sets {', '.join(initialized[:3])} by the rows that it gets before it uses them, as a layer does that initializes itself from its first "
        "batch. Run a batch through the module in on_fit_start, so that training begins after that."
        if initialized
        else ""
    )
    drawn = (
        f" Its random draws could not be replayed ({not_replayed}), and without them it differs too; draw in prepare or "
        "on_after_batch_transfer, which run once a batch."
        if not_replayed
        else ""
    )
    adds = (
        f" Its loss adds up {len(summands)} summands ({', '.join(summands)}), and weights for each of them do not agree either: one is divided by a number "
        "that no field of the batch gives."
        if summands
        else ""
    )
    return (
        f"{whose} cannot be split exactly: the gradient of {rows} rows differs from that of their micro-batches "
        f"({tried}, relative, at {parameter}).{skips}{divides}{adds}{sets}{drawn} The ways out, in MicroBatchRules from "
        "configure_micro_batches: loss_weight, the number of terms its loss is a mean over; loss_is_sum=True with totals from prepare; "
        "unit=n for a loss over groups of n rows; encoders=(…) if the loss compares rows (contrastive) and these submodules treat "
        "each row by itself; splittable=False to run batches whole; check=False to split all the same."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def refusal_of_existence(whose: str, rows: int, parameter: str, *, is_of_whole: bool) -> str:
    """Return the error message for a parameter with a gradient only whole, or only split.

    Args:
        whose: The name of the module's class.
        rows: The number of rows that ran.
        parameter: The name of the parameter.
        is_of_whole: Whether the whole rows give the gradient.
    """
    given = (
        f"{rows} rows, and their micro-batches give it none"
        if is_of_whole
        else f"micro-batches of {rows} rows, and these rows whole give it none"
    )
    return (
        f"{whose} cannot be split exactly: {parameter} gets a gradient of zeros from {given}. "
        "Optimizers with momentum or weight decay update a parameter with zeros, and leave one without a gradient alone. Let the step use it for any "
        "number of rows, or for none, or declare MicroBatchRules(splittable=False) to run batches whole, or check=False to split all the same."
    )


TRAINING_HOOKS = "on_train_batch_end or on_before_zero_grad"
EVALUATION_HOOKS = {
    "validation": "on_validation_batch_end",
    "test": "on_test_batch_end",
    "predict": "on_predict_batch_end",
}  # hooks that run once a batch, by phase


def refusal_of_state(whose: str, paths: Sequence[str], *, hooks: str = TRAINING_HOOKS) -> str:
    """Return the error message for a module whose step writes state that no rule merges.

    Args:
        whose: The name of the module's class.
        paths: The paths of that state.
        hooks: The names of the hooks that run once a batch.
    """
    return (
        f"{whose} writes {', '.join(paths[:3])} in its step, and micro-batches write other values than the whole batch. Write it once a batch: "
        f"in {hooks}; or declare MicroBatchRules(splittable=False) to run batches whole, or check=False to "
        "split all the same."
    )


def refusal_of_predictions(
    whose: str,
    path: str,
    values: Sequence[Any],
    rows: Sequence[int],
    *,
    fits: Collection[str] | None,
) -> str:
    """Return the error message for predictions that no rule puts together for certain.

    Args:
        whose: The name of the module's class.
        path: The path of the predictions in what the step returns; empty for all of it.
        values: The value of each micro-batch.
        rows: The rows of each micro-batch.
        fits: The rules that fit all checks; None if no check has seen the predictions.
    """
    given = f"in configure_micro_batches: MicroBatchRules(merge=MergeRules(outputs={{{path!r}: …}}))"
    whole = "run batches whole: with a larger evaluation_micro_batch_size or budget, MicroBatchRules(splittable=False), or smaller batches"
    names = sorted({one.removesuffix(" 0") for one in fits or ()} & set(get_args(NamedMerge)))
    has_rows = all(_length(value) == count for value, count in zip(values, rows, strict=True))
    rounding = (
        f' Where rounding alone changes such integers, as classes of rows whose largest values are close, say "concatenate" {given}.'
        if all(map(_are_integers, values))
        else ""
    )
    if names:
        hint = f"Of the rules that fit so far, {' and '.join(map(repr, names))}, give the one that holds for every batch, {given}; or {whole}."
    elif has_rows and len({tuple(getattr(value, "shape", ()))[1:] for value in values}) > 1:
        hint = (
            "Its rows have other lengths in other micro-batches: the step pads them to the longest of the rows that it gets. Pad them to a fixed length; or "
            f"give a function of the values of micro-batches and their numbers of rows that pads and joins the values, {given}; or {whole}."
        )
    elif fits is None and has_rows:
        hint = f'If each entry depends on its own row only, say "concatenate" {given}; else {whole}.'
    elif fits is None:
        hint = f"Return one entry for each row; or say how values merge, {given}; or {whole}."
    elif has_rows:
        hint = (
            "Its rows get other values in the whole batch, or none: these depend on other rows, on the number of rows or on earlier batches. No "
            f"rule is right for that; {whole}.{rounding}"
        )
    else:
        hint = (
            f"No rule gives the value of the whole batch: it is of all rows together. Return one entry for each row; or {whole}; or, if it follows "
            f"from the values of micro-batches and their numbers of rows, give a function of the two, {given}."
        )
    where = f"what {whose}.predict_step returns" + (f" at {path!r}" if path else "")
    return (
        f"memory asks for splitting a batch of predictions, and {where} is not known to be one entry for each row: nothing puts the predictions "
        f"of micro-batches together for certain. {hint}"
    )


def _length(value: Any) -> int | None:
    """Return the number of entries of a tensor, array or list along its first dimension."""
    if isinstance(value, (list, tuple)):
        return len(value)
    return next(iter(getattr(value, "shape", ())), None)


def _are_integers(value: Any) -> bool:
    """Return whether the entries of a tensor, an array or a list are integers, which may be classes."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, int) for one in value)
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, np.ndarray) and value.dtype.kind in "iub"


def refusal_of_updates(whose: str, parameter: str) -> SplitError:
    """Return the error for a module whose backward pass writes trained parameters.

    Args:
        whose: The name of the module's class.
        parameter: The name of a parameter that is written.
    """
    return SplitError(
        f"{whose} writes {parameter} during the backward pass, as an optimizer in a gradient hook does. With a split batch it would write after "
        "each micro-batch. Let the Trainer's optimizer write it, or declare MicroBatchRules(splittable=False) to run batches whole. "
        f"{_WRITTEN}",
        is_final=True,
    )


def refusal_of_writes(whose: str, parameter: str) -> SplitError:
    """Return the error for a step that writes trained parameters after their use.

    The arguments are those of `refusal_of_updates`.
    """
    late = _LATE.format(whose=whose, change=f"writes {parameter}", with_them="the written weights")
    way_out = "Write it in on_train_batch_end or optimizer_step, or declare MicroBatchRules(splittable=False) to run batches whole."
    return SplitError(f"{late} {way_out} {_WRITTEN}", is_final=True)


def refusal_of_moves(whose: str, parameter: str) -> SplitError:
    """Return the error for a step that moves trained parameters each time that it runs.

    The arguments are those of `refusal_of_updates`.
    """
    return SplitError(
        f"{whose} writes {parameter} in its step, in another way each time that the step runs, as an average of weights does; a split batch would "
        "write it once for each micro-batch. If only the step writes it, freeze it (requires_grad_(False)): what a step writes to frozen "
        "parameters is merged. Otherwise write it in on_train_batch_end, or declare MicroBatchRules(splittable=False) to run batches whole. "
        f"{_WRITTEN}",
        is_final=True,
    )


def refusal_of_switches(whose: str, parameter: str) -> SplitError:
    """Return the error for a step that freezes or unfreezes a parameter after its use."""
    late = _LATE.format(whose=whose, change=f"changes requires_grad of {parameter}", with_them="the change")
    return SplitError(
        f"{late} Change it at the beginning of the step, in on_train_batch_start or on_train_batch_end, or declare "
        "MicroBatchRules(splittable=False) to run batches whole."
    )


def refusal_of_renormed(whose: str, parameter: str) -> SplitError:
    """Return the error for an embedding with `max_norm` whose weight has another use."""
    return SplitError(
        f"{whose} uses {parameter} in an embedding with max_norm and elsewhere, as tied weights are. The embedding scales rows of it in place, in "
        "each forward pass, and a split batch would use it elsewhere before all rows are scaled. Scale it in on_train_batch_start "
        "(torch.renorm) and leave max_norm out, untie the weights, or declare MicroBatchRules(splittable=False) to run batches whole."
    )


_LATE = "{whose} {change} in its step, after its forward pass has used it, and a split batch would run its other micro-batches with {with_them}."
_WRITTEN = "This check has written it too: go on from a checkpoint, or start anew."


def unsplit(paths: Sequence[str]) -> str:
    """Return the end of an error message: the fields that every micro-batch gets whole."""
    if not paths:
        return ""
    named = ", ".join(map(repr, paths[:3])) + (" …" if len(paths) > 3 else "")
    return f" Every micro-batch gets {named} whole: if rows have entries there, such as the patches of their images, give rows=RowRules(split=…)."


def failure_on_rows(step: str, rows: str, error: BaseException) -> str:
    """Return the beginning of the error message for a step that fails on some rows.

    Args:
        step: The class and the name of the step's method.
        rows: The number of rows, such as `"3"` or `"3 of 8"`.
        error: The error of the step.
    """
    text = (str(error).splitlines() or [""])[0]
    return f"{step} fails on {rows} rows of its batch ({type(error).__name__}: {text}), so the batch cannot be split."
