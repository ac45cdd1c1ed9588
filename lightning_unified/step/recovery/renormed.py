"""Restore the rows of trained embeddings that a step scales in place (`max_norm`)."""

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["RenormedRows"]

_RENORM: Any = torch.embedding_renorm_  # the original: blocks may be nested


class RenormedRows:
    """Keeps the rows that embeddings with `max_norm` write inside the block, and restores them.

    `torch.nn.functional.embedding` and `embedding_bag` scale the rows that they look up, in place and without a gradient. So a trial run
    or a failed attempt leaves other weights behind. Each call costs the bytes of its distinct rows. Code that torch compiles, and
    TorchScript, call the operator themselves: their rows are not kept.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        self._outer: Any = torch.embedding_renorm_
        torch.embedding_renorm_ = self._renorm
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.embedding_renorm_ = self._outer

    def _renorm(self, weight: Tensor, indices: Tensor, *options: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                rows = indices.flatten().unique()
                self._kept.append((weight, rows, weight.index_select(0, rows)))
        return _RENORM(weight, indices, *options)

    def wrote(self, parameter: Tensor) -> bool:
        """Return whether rows of `parameter` are kept; False for shards, whose gathered copies embeddings scale."""
        if not self._kept or isinstance(parameter, DTensor):
            return False
        place = parameter.untyped_storage().data_ptr()
        return any(weight.untyped_storage().data_ptr() == place for weight, _, _ in self._kept)

    def restore(self) -> None:
        """Write the kept rows back, and drop them."""
        with torch.no_grad():
            while self._kept:
                weight, rows, before = self._kept.pop()
                weight.index_copy_(0, rows, before)
