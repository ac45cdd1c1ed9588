"""Candidates: the loss rules that may hold for a batch, found from its fields."""

import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.fields import graphs_of, leaf_at, lengths_of, named_tensors
from lightning_unified.step.exactness.facts.figures import IGNORED
from lightning_unified.step.exactness.facts.labels import Scoring
from lightning_unified.step.exactness.facts.terms import Terms
from lightning_unified.step.exactness.losses.assigned import AssignedLabels, background_of
from lightning_unified.step.exactness.losses.rules import LossRule

__all__ = ["candidates", "guesses", "guesses_by_divisor", "guesses_of_whole_losses", "may_count"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LABELS = ("labels", "label", "targets", "target")
_WEIGHTS = ("weight", "mask")
_COUNTS = ("len", "count", "num", "size", "frames")  # in names of fields
_CLASSES = 8  # judgement: a loss seldom tells apart more classes by masks
_NAMED = 4  # class weights that a rule's name shows
_COLUMNS = 16  # judgement: labels of more tasks are seldom counted by task
_BY_DIVISOR: dict[str, Any] = {"is_guess": True, "is_by_divisor": True}
_AHEAD = 4  # judgement: tokens that heads of a language model predict ahead
# labels that losses ignore: torch's default, padding, "no class", segmentation's void
_LEFT_OUT = (IGNORED, 0, -1, 255)


def candidates(
    batch: Any, rows: int, ignored: Collection[int] = (), scorings: Collection[Scoring] = ()
) -> list[LossRule]:
    """Return the loss rules that may hold for a batch, the commonest first.

    `ignored` holds labels that the module's losses are known to ignore, and `scorings` how they are known to score labels.

    1. Rows.
    2. Scored labels: entries other than -100 of an integer field named `labels`, `label`, `targets` or `target`; and the same without each
       row's first label, which causal language models do not score.
    3. For any integer field: entries other than -100, 0, -1, 255, an ignored label or padding, if the field has that value; with and
       without each row's first entry. Padding is the value that most often occurs twice in a row at the end or the beginning of rows.
    4. Sums of masks and of non-negative weights, with and without each row's first entry; sums of counts, one for each row. Weights of
       positions and counts must be in fields that are named so.
    5. For a floating-point field with missing values: entries that are finite, and rows all of whose entries are.
    6. Nodes and edges of graphs.
    7. Sums of the class weights of an integer field.
    8. No weights: losses that are sums.
    """
    found = [LossRule("rows")]
    later: list[LossRule] = []
    for path, tensor in named_tensors(batch):
        is_sparse = tensor.layout not in (torch.strided, torch.jagged)
        if tensor.dim() and tensor.shape[0] == rows and tensor.numel() and not is_sparse:
            is_label = path.rsplit(".", 1)[-1] in _LABELS
            if is_label and not tensor.is_floating_point():
                found += _counting(path, tensor, IGNORED, name="scored labels" if path in _LABELS else f"scored {path}")
            later += _of_leaf(path, tensor, ignored, skip=IGNORED if is_label else None)
    later += [
        LossRule(f"{parts} of {path!r}" if path else parts, Terms(path, size=f"num_{parts}"))
        for path, graphs in graphs_of(batch)
        for parts in ("nodes", "edges")
        if isinstance(getattr(graphs, f"num_{parts}", None), int)
    ]
    later += [rule for one in scorings if one.weights for rule in _weighted(batch, rows, one)]
    return [*found, *later, LossRule("sum", adds=True)]


def guesses(batch: Any, rows: int) -> Iterator[LossRule]:
    """Yield the loss rules that a check tries where no candidate agrees."""
    for path, tensor in _fields_of_numbers(batch, rows, _INTEGERS):
        is_scored = tensor.dim() == 2 and bool((tensor == IGNORED).any())
        for shift in range(2, min(_AHEAD + 1, tensor.shape[1])) if is_scored else ():
            yield LossRule(f"scored {path!r}, shifted by {shift}", Terms(path, IGNORED, shift=shift), is_guess=True)
        if is_scored and tensor.shape[1] > 1:  # labels that the data set has moved against the tokens
            yield LossRule(f"scored {path!r} but the last", Terms(path, IGNORED, shift=-1), is_guess=True)
        least, most = (float(one) for one in tensor.aminmax())
        if tensor.dim() == 1 and least >= 0 and not _is_count(path, tensor):
            yield LossRule(f"total of {path!r}", Terms(path, kind="total"), is_guess=True)
        if least <= 0 < most:
            yield LossRule(f"entries of {path!r} above 0", Terms(path, kind="above 0"), is_guess=True)
    for path, lengths in lengths_of(batch, rows):
        if len({*lengths}) > 1:
            yield LossRule(f"lengths of {path!r}", Terms(path, kind="lengths"), is_guess=True)


def guesses_of_whole_losses(batch: Any, rows: int) -> Iterator[LossRule]:
    """Yield further guesses, by which no summand of a loss is weighted.

    A summand may have a gradient in one micro-batch only, which some of so many counts of a few rows would fit by chance.
    """
    for path, tensor in _fields_of_numbers(batch, rows, (*_INTEGERS, torch.bool)):
        if tensor.dim() > 1 and not bool(tensor.flatten(1).any(1).all()):
            yield LossRule(f"rows of {path!r} with an entry", Terms(path, kind="rows with an entry"), is_guess=True)
        if tensor.dtype == torch.bool:
            continue
        least, most = (float(one) for one in tensor.aminmax())
        if tensor.dim() == 1 and least >= 0 and not _is_count(path, tensor):
            yield LossRule(f"places up to {path!r}", Terms(path, kind="places up to"), is_guess=True)
        yield from _of_classes(path, tensor, least, most)


def guesses_by_divisor(batch: Any, rows: int, scorings: Collection[Scoring] = ()) -> Iterator[LossRule]:
    """Yield the loss rules that only the divisor of a summand, in autograd's graph, tells from chance.

    They count the zeros of a mask, the entries of one class and those of all others, and all of these in one column of a field. Others count
    labels that a step assigns to the entries of rows of different lengths.
    """
    for weight, background in filter(None, (background_of(one.weights) for one in scorings)):
        for path, _ in lengths_of(batch, rows):
            assigned = AssignedLabels(path, weight, background)
            yield LossRule(f"labels assigned to {path!r}", assigned, **_BY_DIVISOR)
    for path, tensor in _fields_of_numbers(batch, rows, (*_INTEGERS, torch.bool, *_FLOATS)):
        yield from _of_values(tensor, repr(path), Terms(path))
        if tensor.dim() == 2 and 1 < tensor.shape[1] <= _COLUMNS:
            for column in range(tensor.shape[1]):
                own = f"column {column} of {path!r}"
                yield from _of_values(tensor[:, column], own, Terms(path, column=column))


def _of_values(tensor: Tensor, named: str, terms: Terms) -> Iterator[LossRule]:
    """Yield the rules that count single values of a field, or all others, and finite ones."""
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        yield LossRule(f"entries of {named} that are finite", replace(terms, kind="finite"), **_BY_DIVISOR)
        return
    if tensor.is_floating_point() and not bool(((tensor == 0) | (tensor == 1)).all()):
        return
    least, most = (float(one) for one in (tensor.byte() if tensor.dtype == torch.bool else tensor).aminmax())
    values = _values(tensor, least, most)
    for value in values:
        yield LossRule(f"entries of {named} that are {value}", replace(terms, kind=f"only {value}"), **_BY_DIVISOR)
        if len(values) > 2:  # else all but the other one
            other = replace(terms, left_out=value)
            yield LossRule(f"entries of {named} other than {value}", other, **_BY_DIVISOR)


def _fields_of_numbers(batch: Any, rows: int, dtypes: Collection[torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    for path, tensor in named_tensors(batch):
        is_plain = tensor.layout is torch.strided and tensor.dtype in dtypes
        if is_plain and tensor.dim() and tensor.shape[0] == rows and tensor.numel():
            yield path, tensor


def _of_classes(path: str, tensor: Tensor, least: float, most: float) -> Iterator[LossRule]:
    """Yield the rules that leave out one of a few classes, or count one."""
    values = _values(tensor, least, most)
    usual = (*_LEFT_OUT, *_padding(tensor)) if values else ()
    for value in values:
        if value not in usual:
            yield LossRule(f"entries of {path!r} other than {value}", Terms(path, value), is_guess=True)
        if len(values) > 2:  # else all but the other one
            yield LossRule(f"entries of {path!r} that are {value}", Terms(path, kind=f"only {value}"), is_guess=True)


def _values(tensor: Tensor, least: float, most: float) -> list[int]:
    """Return the whole numbers in a tensor, if they are few and not all the same."""
    found = range(int(least), int(most) + 1) if 0 < most - least < _CLASSES else ()
    return [value for value in found if bool((tensor == value).any())]  # quicker than to sort, as `unique` does


def may_count(rule: LossRule, batch: Any) -> bool:
    """Return whether a rule may hold for a batch.

    A rule that sums a field holds only where the field may be a mask or weights: labels may look like a mask in some batches.
    """
    if not isinstance(rule.count, Terms) or rule.count.left_out is not None or rule.count.kind:
        return True
    path = rule.count.path
    leaf = leaf_at(batch, path)
    if leaf is None or leaf.dtype == torch.bool or not bool(leaf.any()):
        return True
    return _is_weight(path, leaf) or _is_count(path, leaf)


def _of_leaf(path: str, tensor: Tensor, ignored: Collection[int], *, skip: int | None) -> list[LossRule]:
    if tensor.is_complex():
        return []
    if tensor.dtype == torch.bool or _is_weight(path, tensor):
        return _counting(path, tensor, None, name=f"sum of {path!r}")
    if tensor.is_floating_point():
        return _without_missing(path, tensor)
    values = dict.fromkeys((*_LEFT_OUT, *sorted(ignored), *_padding(tensor)))
    present = [value for value in values if value != skip and bool((tensor == value).any())]
    counted = [
        rule
        for value in present
        for rule in _counting(path, tensor, value, name=f"entries of {path!r} other than {value}")
    ]
    return [*counted, LossRule(f"sum of {path!r}", Terms(path))] if _is_count(path, tensor) else counted


def _weighted(batch: Any, rows: int, by: Scoring) -> Iterator[LossRule]:
    """Yield the rules that weight the entries of integer fields by their class."""
    few = ", ".join(f"{weight:.6g}" for weight in by.weights)
    named = few if len(by.weights) <= _NAMED else f"of {len(by.weights)} classes ({zlib.crc32(few.encode()):08x})"
    for path, tensor in named_tensors(batch):
        is_plain = tensor.layout is torch.strided and tensor.dtype in _INTEGERS and tensor.dim() and tensor.numel()
        if not is_plain or tensor.shape[0] != rows:
            continue
        terms = Terms(path, by.ignore_index, weights=by.weights)
        low, high = (int(one) for one in tensor.aminmax())
        if low >= min(0, by.ignore_index) and high < max(len(by.weights), by.ignore_index + 1):
            yield LossRule(f"class weights {named} of {path!r}", terms)
            if tensor.dim() == 2 and tensor.shape[1] > 1:
                yield LossRule(f"class weights {named} of {path!r}, shifted", replace(terms, shift=1))


def _without_missing(path: str, tensor: Tensor) -> list[LossRule]:
    """Return rules that leave out missing values: entries that are NaN or infinite, and rows with such entries."""
    if tensor.element_size() == 1 or bool(tensor.isfinite().all()):  # torch has no `isfinite` for formats of 8 bits
        return []
    rules = [LossRule(f"entries of {path!r} that are finite", Terms(path, kind="finite"))]
    if tensor.dim() > 1:
        rules.append(LossRule(f"rows of {path!r} that are finite", Terms(path, kind="finite rows")))
    return rules


def _padding(tensor: Tensor) -> list[int]:
    """Return the likely padding values of an integer tensor.

    These occur most often as two equal entries at the end, or at the start, of rows.
    """
    if tensor.dim() != 2 or tensor.shape[1] < 2 or tensor.dtype == torch.bool:
        return []
    ends = (tensor[:, -2:].cpu(), tensor[:, :2].cpu())
    twice = [pair[pair[:, 0] == pair[:, 1], 0] for pair in ends]
    return [int(values.mode().values) for values in twice if len(values)]


def _is_count(path: str, tensor: Tensor) -> bool:
    """Return whether a tensor may hold one count for each row, such as its length.

    Its name must say so: sums of any integers, such as labels, are close to multiples of the rows.
    """
    is_named = any(word in path.rsplit(".", 1)[-1].lower() for word in _COUNTS)
    is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return is_named and is_integer and tensor.dim() == 1 and bool((tensor >= 0).all()) and bool(tensor.any())


def _is_weight(path: str, tensor: Tensor) -> bool:
    """Return whether a tensor may hold a mask or weights.

    It then has only zeros and ones, or one non-negative number for each row, and is not all zero. Weights of positions must be named so.
    """
    is_named = any(word in path.rsplit(".", 1)[-1].lower() for word in _WEIGHTS)
    if tensor.is_floating_point() and (tensor.dim() == 1 or (is_named and tensor.dim() == 2)):
        return bool((tensor >= 0).all()) and bool(tensor.any())
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())


def _counting(path: str, tensor: Tensor, left_out: int | None, *, name: str) -> list[LossRule]:
    """Return rules that count a field's entries: all of them, and all but the first of each row."""
    rules = [LossRule(name, Terms(path, left_out))]
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        rules.append(LossRule(f"{name}, shifted", Terms(path, left_out, shift=1)))
    return rules
