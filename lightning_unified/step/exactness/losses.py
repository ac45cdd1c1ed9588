"""Loss rules: the candidate weights of micro-batches, and the shares they give."""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.fields import graphs_of, leaf_at, lengths_of, named_tensors
from lightning_unified.step.exactness.facts.figures import IGNORED
from lightning_unified.step.exactness.facts.labels import Scoring
from lightning_unified.step.exactness.facts.terms import Terms
from lightning_unified.step.results.merging import MicroBatchWeights

__all__ = [
    "LossRule",
    "Weighting",
    "candidates",
    "declared",
    "guesses",
    "likeliest",
    "may_count",
    "require_counts",
    "restored",
    "shares",
    "shares_differ",
]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LABELS = ("labels", "label", "targets", "target")
_WEIGHTS = ("weight", "mask")
_COUNTS = ("len", "count", "num", "size", "frames")  # in names of fields
_ROUNDING = 1e-9  # largest difference of two equal shares
_NAMED = 4  # class weights that a rule's name shows
_DECLARED = ("loss_weight", "loss_is_sum")
# labels that losses ignore: torch's default, padding, "no class", segmentation's void
_LEFT_OUT = (IGNORED, 0, -1, 255)


@dataclass(frozen=True, slots=True)
class LossRule:
    """One way to weight micro-batches.

    Args:
        name: A name in words; two rules with the same name are the same rule.
        count: Returns the number of loss terms of a micro-batch; `None` counts its rows.
        adds: Whether losses add up without weights. `count` is then only the number of terms of a batch in its accumulation window.
        is_guess: Whether nothing but the numbers in a batch speaks for the rule. A check tries it only where no other rule agrees.
    """

    name: str
    count: Callable[[Any], Any] | None = None
    adds: bool = False
    is_guess: bool = False

    @property
    def reads_a_field(self) -> bool:
        """Whether the rule counts the terms by one field, on whatever device that is."""
        return isinstance(self.count, Terms)

    @property
    def class_weights(self) -> tuple[float, ...]:
        """The weight of each class, if the rule counts by class."""
        return self.count.weights if isinstance(self.count, Terms) else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the rule for a checkpoint; a declared rule is saved by its name only."""
        terms = asdict(self.count) if isinstance(self.count, Terms) else None
        return {"name": self.name, "terms": terms, "adds": self.adds}


def declared(rules: MicroBatchRules) -> LossRule | None:
    """Return the rule that a module declares; None if the check has to find one."""
    if rules.loss_is_sum:
        return LossRule("loss_is_sum", rules.loss_weight, adds=True)
    return None if rules.loss_weight is None else LossRule("loss_weight", rules.loss_weight)


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
    for path, tensor in named_tensors(batch):
        is_plain = tensor.layout is torch.strided and tensor.dtype in _INTEGERS
        if not (is_plain and tensor.dim() and tensor.shape[0] == rows and tensor.numel()):
            continue
        least, most = (float(one) for one in tensor.aminmax())
        if tensor.dim() == 1 and least >= 0 and not _is_count(path, tensor):
            yield LossRule(f"total of {path!r}", Terms(path, kind="total"), is_guess=True)
        if least <= 0 < most:
            yield LossRule(f"entries of {path!r} above 0", Terms(path, kind="above 0"), is_guess=True)
    for path, lengths in lengths_of(batch, rows):
        if len({*lengths}) > 1:
            yield LossRule(f"lengths of {path!r}", Terms(path, kind="lengths"), is_guess=True)


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


def restored(state: dict[str, Any], rules: MicroBatchRules) -> LossRule | None:
    """Return the rule restored from its `state_dict`.

    The result is None if the module's declaration has changed.
    """
    own = declared(rules)
    if own is not None or state["name"] in _DECLARED:
        return own if own is not None and own.name == state["name"] else None
    return LossRule(state["name"], Terms(**state["terms"]) if state["terms"] else None, adds=state["adds"])


def likeliest(rules: Sequence[LossRule]) -> LossRule:
    """Return the rule for undecided checks: scored labels if there are any, else rows.

    A declared rule is the only one in `rules`, and is returned.
    """
    return rules[1] if len(rules) > 1 and rules[1].name.startswith("scored") else rules[0]


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
                yield LossRule(f"class weights {named} of {path!r}, shifted", replace(terms, is_shifted=True))


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
        rules.append(LossRule(f"{name}, shifted", Terms(path, left_out, is_shifted=True)))
    return rules


def require_counts(rule: LossRule, counted: Sequence[float]) -> None:
    """Raise `SplitError` if a rule's counts are no valid numbers of loss terms."""
    if not all(count >= 0 for count in counted):
        raise SplitError(f"{rule.name} gave {list(counted)}: it must give the number of loss terms, 0 or more.")


def shares(rule: LossRule, micro_batches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the factor of each micro-batch's loss; rows decide if no micro-batch has a term."""
    if rule.adds:
        return [1.0] * len(micro_batches)
    counted = (
        [float(size) for size in sizes] if rule.count is None else [float(rule.count(one)) for one in micro_batches]
    )
    if not sum(counted):
        counted = [float(size) for size in sizes]
    return [count / sum(counted) for count in counted]


def shares_differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two rules give micro-batches different shares."""
    return len(one) != len(other) or any(abs(a - b) > _ROUNDING for a, b in zip(one, other, strict=True))


class Weighting:
    """The share of each micro-batch in its batch.

    Many losses are means over terms (samples, tokens). The batch's loss is then the mean of the micro-batches' losses, weighted by their
    numbers of terms. The same holds for the gradient. Losses that are sums add up. Rows weight a batch without any loss term: each micro-batch then
    has the loss of the whole batch, 0 or NaN.

    Args:
        rule: The loss rule that weights micro-batches.
        batches: The micro-batches.
        rows: The number of rows of each micro-batch.
        zero_by_rows: Whether a batch without any loss term is weighted by rows.

    Raises:
        SplitError: If the rule counts a negative number of terms, or NaN.
    """

    def __init__(
        self, rule: LossRule, batches: Sequence[Any], rows: Sequence[int], *, zero_by_rows: bool = True
    ) -> None:
        self._adds, self._rule = rule.adds, rule
        counted = list(map(float, rows))
        if rule.count is not None and not rule.adds:
            counted = _on_host([rule.count(batch) for batch in batches])
        require_counts(rule, counted)
        self._counted = counted
        terms = counted if sum(counted) or not zero_by_rows else list(map(float, rows))
        self.weights = MicroBatchWeights(list(rows), terms)

    @property
    def terms(self) -> float:
        """The number of loss terms of the whole batch; its rows if terms are not counted."""
        return sum(self.weights.terms)

    def share(self, index: int) -> float | None:
        """Return a micro-batch's share of the batch, 0 to 1; None if losses add up without weights."""
        return None if self._adds else self.weights.terms[index] / sum(self.weights.terms)

    @property
    def shares(self) -> list[float]:
        """The factor of each micro-batch's loss."""
        found = [self.share(index) for index in range(len(self.weights.terms))]
        return [1.0 if share is None else share for share in found]

    def has_loss_of_nothing(self, index: int, loss: Tensor) -> bool:
        """Return whether a micro-batch without a loss term has a loss all the same.

        An example is a sum divided by `max(terms, 1)`. A loss that is not finite is a mean of no terms. A declared `loss_weight` of 0 leaves
        out any loss.
        """
        is_counted = self._counted[index] or not self._rule.reads_a_field
        return not is_counted and bool(loss.detach().isfinite() and loss.detach() != 0)

    def loss(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """Return the whole batch's loss: the weighted sum of losses; None without losses.

        Raises:
            SplitError: If some micro-batches with loss terms gave no loss.
        """
        given = [(loss, self.share(index)) for index, loss in enumerate(losses) if loss is not None]
        if given and len(given) != sum(1 for weight in self.weights.terms if weight):
            raise SplitError(
                "training_step returned None for some micro-batches of a batch and a loss for others, so the batch was not split exactly; "
                'let it return a loss for every micro-batch, or leave micro_batch_size="auto" and raise the budget so that batches run whole.'
            )
        shares = [loss if share is None else loss * share for loss, share in given]
        return torch.stack(shares).sum(0) if shares else None


def _on_host(weights: list[Any]) -> list[float]:
    """Return weights as plain numbers; all tensors are copied from the device in one transfer."""
    tensors = [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]
    read = iter(torch.stack([one.to(tensors[0].dtype) for one in tensors]).tolist() if tensors else ())
    return [float(next(read) if isinstance(weight, Tensor) else weight) for weight in weights]
