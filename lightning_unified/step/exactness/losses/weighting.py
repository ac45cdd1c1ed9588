"""Shares: the factors of micro-batches' losses that a loss rule gives."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses.rules import LossRule, SummandRule
from lightning_unified.step.results.merging import MicroBatchWeights

__all__ = [
    "Weighting",
    "give_other_shares",
    "needed_summands",
    "require_counts",
    "share_of",
    "shares",
    "shares_differ",
    "with_losses",
]

_ROUNDING = 1e-9  # largest difference of two equal shares


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
    if rule.least:
        return [max(count, rule.least) / max(sum(counted), rule.least) for count in counted]
    if not sum(counted):
        counted = [float(size) for size in sizes]
    return [count / sum(counted) for count in counted]


def with_losses(
    weights: MicroBatchWeights, summands: Sequence[Sequence[float]], losses: Sequence[tuple[Tensor, Tensor]]
) -> MicroBatchWeights:
    """Return the weights of a loss whose summands have weights of their own.

    Args:
        weights: The rows of the micro-batches.
        summands: For each summand, the factors of the micro-batches' summands.
        losses: The loss of each micro-batch, and its share of the batch's.
    """
    read = torch.stack([torch.stack([*pair]) for pair in losses]).tolist() if losses else []
    return replace(weights, summands=summands, losses=[own for own, _ in read], loss=sum(share for _, share in read))


def share_of(values: Mapping[str, Tensor], factors: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's loss and its share of the batch's, given its summands and their factors.

    A summand without a term may be 0 / 0; it adds nothing to the share. Nor does what has no factor.
    """
    shares = [value * factors[key] for key, value in values.items() if factors.get(key)]
    own = _total([*values.values()]) if values else torch.zeros(())
    return own, _total(shares) if shares else torch.zeros_like(own)


def _total(values: Sequence[Tensor]) -> Tensor:
    total = values[0].reshape(())
    for value in values[1:]:
        total = total + value.reshape(())
    return total


def needed_summands(rule: LossRule, batches: Sequence[Any]) -> dict[str, list[bool]]:
    """Return whether each micro-batch must have each summand, by key.

    It must if it has terms of the summand, unless all checks saw that multiplied by 0.
    """
    none = [False] * len(batches)
    return {one.key: none if one.is_zero else _have_terms(one.first, batches) for one in rule.summands}


def _have_terms(rule: LossRule, batches: Sequence[Any]) -> list[bool]:
    if rule.count is None or rule.least:
        return [True] * len(batches)
    return [bool(float(rule.count(batch))) for batch in batches]


def _shares_of_summand(of: SummandRule, batches: Sequence[Any], rows: Sequence[int]) -> list[float]:
    """Return the factor of one summand in each micro-batch.

    Raises:
        SplitError: If several rules may hold for it, and give other factors.
    """
    first = shares(of.first, batches, rows)
    if of.is_open and any(shares_differ(first, shares(one, batches, rows)) for one in of.rules[1:]):
        raise SplitError(
            f"the loss has a summand ({of.key}) of which no check had rows that tell whether it is weighted by "
            f"{' or by '.join(one.name for one in of.rules)}, which differ for this batch. Run larger micro-batches, or declare "
            "MicroBatchRules(splittable=False) to run batches whole."
        )
    return first


def give_other_shares(rules: Sequence[LossRule], batches: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return whether some of these rules weight the micro-batches differently."""
    first, *others = ([1.0] * len(sizes) if rule.adds else shares(rule, batches, sizes) for rule in rules)
    return any(shares_differ(first, other) for other in others)


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
        self.summands = {one.key: _shares_of_summand(one, batches, rows) for one in rule.summands}
        """For each summand with a weight of its own, the factors of the micro-batches' summands."""
        self._needed = needed_summands(rule, batches)
        self._losses: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def weights_of_results(self) -> MicroBatchWeights:
        """The weights by which results merge, after all micro-batches have run: those of the summands too."""
        if not self.summands:
            return self.weights
        return with_losses(self.weights, [*self.summands.values()], [self._losses[at] for at in sorted(self._losses)])

    def needed(self, index: int) -> dict[str, bool]:
        """Return whether micro-batch `index` must have each summand, by key."""
        return {key: needed[index] for key, needed in self._needed.items()}

    def note(self, index: int, values: Mapping[str, Tensor]) -> Tensor:
        """Note the values of micro-batch `index`'s summands and of the rest; return its share of the loss."""
        own, share = share_of(values, {key: factors[index] for key, factors in self.summands.items()})
        self._losses[index] = own, share
        return share

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

    def differs(self, other: "Weighting") -> bool:
        """Return whether another weighting gives other factors to micro-batches, or to their summands."""
        if self.summands.keys() != other.summands.keys():
            return True
        pairs = [(factors, other.summands[key]) for key, factors in self.summands.items()]
        return any(shares_differ(*pair) for pair in [(self.shares, other.shares), *pairs])

    def has_loss_of_nothing(self, index: int, loss: Tensor) -> bool:
        """Return whether a micro-batch without a loss term has a loss all the same.

        An example is a sum divided by `max(terms, 1)`. A loss that is not finite is a mean of no terms. A declared `loss_weight` of 0 leaves
        out any loss.
        """
        is_counted = self._counted[index] or self._adds or not self._rule.reads_a_field
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
