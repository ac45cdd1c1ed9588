"""Base of modules that wrap a model of transformers: a switch for recomputation."""

from abc import abstractmethod

from torch import nn

from lightning_unified.nn.recomputing import Recomputing

__all__ = ["RecomputeSwitch"]


class RecomputeSwitch:
    """`recompute` switches activation checkpointing of the blocks on and off."""

    _recomputing: Recomputing | None = None

    @abstractmethod
    def recompute_blocks(self) -> list[nn.Module]:
        """Return the blocks in running order, for activation checkpointing of some of them."""

    @property
    def recompute(self) -> bool:
        """Whether each block recomputes its activations; a strategy may set it before the run."""
        return self._recomputing is not None

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if value and self._recomputing is None:
            self._recomputing = Recomputing(self.recompute_blocks())
        elif not value and self._recomputing is not None:
            self._recomputing.remove()
            self._recomputing = None
