"""The summands of a split batch's loss, each with weights of its own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import isfinite

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses import LossRule, Weighting
from lightning_unified.step.exactness.losses.summands import (
    REST,
    StepSummands,
    Summand,
    are_proportional,
    scale_summands,
)

__all__ = ["SplitSummands"]

_ROUNDING = 1e-3  # of a loss as the sum of its summands, in float32 and 16 bits


class SplitSummands:
    """Weights the summands of micro-batches' losses.

    Args:
        reader: Reads the summands of losses.
        weighting: The weights of the micro-batches.
        rule: The rule that gives them.
        whose: The name of the module's class.
    """

    def __init__(self, reader: StepSummands, weighting: Weighting, rule: LossRule, *, whose: str) -> None:
        self._reader, self._weighting, self._whose = reader, weighting, whose
        self._divided = {one.key for one in rule.summands if one.is_divided}
        self.begin()

    def begin(self) -> None:
        """Start over: some optimizers run their closure several times a step."""
        self._unknown: dict[int, str] = {}
        self._divisors: dict[str, list[tuple[Tensor, float]]] = {}
        self._lacking: list[tuple[int, str, Tensor]] = []
        self._rests: list[tuple[Tensor, Tensor]] = []

    def noting(self) -> AbstractContextManager[None]:
        """Note what the step of a micro-batch adds up, inside the block."""
        return self._reader.noting()

    def weigh(self, index: int, loss: Tensor) -> Tensor:
        """Let the backward pass of a micro-batch's loss weight its summands; return its share of the batch's loss."""
        found = self._reader.of(loss)
        if REST not in self._weighting.summands:
            self._rests += [(one.value, loss.detach()) for one in found if one.key == REST and one.value is not None]
            found = [one for one in found if one.key != REST]
        keys = self._keys_of(index, found)
        if keys is None:
            self._unknown[index] = ", ".join(one.key for one in found if one.key != REST) or "none that is known"
            return loss.detach()
        factors = [self._weighting.summands[key][index] for key in keys]
        scale_summands(found, factors)
        for key, one, factor in zip(keys, found, factors, strict=True):
            if factor == 0 and one.value is not None:
                self._lacking.append((index, key, one.value))
            if factor and key in self._divided and one.divisor is not None:
                divisor = torch.as_tensor(one.divisor, device=loss.device, dtype=torch.float32)
                self._divisors.setdefault(key, []).append((divisor.reshape(()), factor))
        values = {key: one.value for key, one in zip(keys, found, strict=True) if one.value is not None}
        return self._weighting.note(index, values).to(loss.dtype)

    def _keys_of(self, index: int, found: Sequence[Summand]) -> list[str] | None:
        """Return the keys of a micro-batch's summands; None if one is unknown, or one with terms is missing.

        Of summands that are alike, those without terms in this micro-batch may be missing.
        """
        known = self._weighting.summands
        own = [one.key for one in found]
        missing = [key for key in known if key not in own and key != REST]
        if any(not self._weighting.lacks(key, index) for key in missing):
            return _without_terms(own, has_terms={key: not self._weighting.lacks(key, index) for key in known})
        is_known = found and known.keys() >= {*own}
        return own if is_known else None

    def lacking(self) -> list[int]:
        """Return the micro-batches with a summand that has no terms and a value all the same, after all have run."""
        values = _on_host([value for _, _, value in self._lacking])
        return [index for (index, _, _), value in zip(self._lacking, values, strict=True) if isfinite(value) and value]

    def unknown(self) -> dict[int, str]:
        """Return the summands of micro-batches whose weights are not known, after all have run."""
        flat = _on_host([divisor for own in self._divisors.values() for divisor, _ in own])
        numbers = iter(flat)
        for key, own in self._divisors.items():
            if not are_proportional([(next(numbers), factor) for _, factor in own]):
                return {**self._unknown, 0: f"{key}, which is divided by another number than its weights"}
        rests = _on_host([one for pair in self._rests for one in pair])
        if any(abs(rest) > _ROUNDING * abs(loss) for rest, loss in zip(rests[::2], rests[1::2], strict=True)):
            return {**self._unknown, 0: REST}
        return self._unknown

    def require_known(self) -> None:
        """Raise `SplitError` if a summand of a micro-batch has no known weights, or others than its divisors."""
        unknown = self.unknown()
        if unknown:
            index, named = next(iter(unknown.items()))
            raise SplitError(
                f"the loss of {self._whose} adds up other summands in micro-batch {index} than in all batches that were checked: {named}. So its weights are not "
                "known. Let the step add up the same summands for any rows, outside of a compiled function, or declare MicroBatchRules(splittable=False) to run batches whole."
            )


def _without_terms(own: Sequence[str], *, has_terms: dict[str, bool]) -> list[str] | None:
    """Return the keys of alike summands that have terms; None if their number differs."""
    counts: dict[str, int] = {}
    for key in own:
        counts[_kind(key)] = counts.get(_kind(key), 0) + 1
    left = {kind: [key for key in has_terms if _kind(key) == kind] for kind in counts}
    for kind, count in counts.items():
        if len(left[kind]) > count:
            left[kind] = [key for key in left[kind] if has_terms[key]]
        if len(left[kind]) != count:
            return None
    missing = [key for key, has in has_terms.items() if has and _kind(key) not in counts and key != REST]
    if missing:
        return None
    return [left[_kind(key)].pop(0) for key in own]


def _kind(key: str) -> str:
    return key.partition(" (")[0]


def _on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Return scalars as numbers, after one transfer."""
    return torch.stack([one.reshape(()).float() for one in numbers]).tolist() if numbers else []
