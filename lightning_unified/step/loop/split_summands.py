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
    are_proportional,
    keys_by_terms,
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
        self._zeros = {one.key for one in rule.summands if one.is_zero}
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
        found, of = self._reader.of(loss), self._weighting.summands
        if REST not in of:
            self._rests += [(one.value, loss.detach()) for one in found if one.key == REST and one.value is not None]
        zeros = {one.key for one in found if one.is_zero}
        keys = keys_by_terms([one.key for one in found], self._weighting.needed(index), zeros) if found else None
        if keys is None or any(key in self._zeros and not one.is_zero for key, one in zip(keys, found, strict=True)):
            self._unknown[index] = ", ".join(one.key for one in found if one.key != REST) or "none that is known"
            return loss.detach()
        factors = [of[key][index] if key in of else 1.0 for key in keys]
        scale_summands(found, factors)
        for key, one, factor in zip(keys, found, factors, strict=True):
            if factor == 0 and one.value is not None:
                self._lacking.append((index, key, one.value))
            if factor and key in self._divided and one.divisor is not None:
                divisor = torch.as_tensor(one.divisor, device=loss.device, dtype=torch.float32)
                self._divisors.setdefault(key, []).append((divisor.reshape(()), factor))
        values = {key: one.value for key, one in zip(keys, found, strict=True) if one.value is not None}
        return self._weighting.note(index, values).to(loss.dtype)

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


def _on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Return scalars as numbers, after one transfer."""
    return torch.stack([one.reshape(()).float() for one in numbers]).tolist() if numbers else []
