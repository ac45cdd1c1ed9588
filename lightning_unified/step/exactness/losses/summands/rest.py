"""What a loss has besides its summands, where a summand without terms makes the loss NaN."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_unified.step.exactness.losses.summands.tree import REST, Summand

__all__ = ["KnownRest"]

_ROUNDINGS = 64  # of a loss, in the difference of a constant from itself


class KnownRest:
    """Knows what the losses of one module have had besides their summands.

    It is the loss without its summands, and so NaN if one of them is. A constant has the value that it had in all steps so far; what varies
    stays NaN.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._varies: Tensor | None = None

    def complete(self, found: Iterable[Summand], loss: Tensor) -> None:
        """Give the rest among the summands of a loss its value; the device decides, without a wait."""
        for one in found:
            if one.key == REST and one.value is not None:
                one.value = self._completed(one.value, loss.detach().reshape(()))

    def _completed(self, value: Tensor, loss: Tensor) -> Tensor:
        is_known = value.isfinite()
        last = torch.full_like(value, torch.nan) if self._last is None else self._last.to(value)
        varies = torch.zeros_like(is_known) if self._varies is None else self._varies.to(value.device)
        allowed = _ROUNDINGS * torch.finfo(loss.dtype).eps * loss.abs()
        self._varies = varies | (is_known & ((value - last).abs() > allowed))
        self._last = torch.where(is_known, value, last)
        return torch.where(self._varies, value, self._last)
