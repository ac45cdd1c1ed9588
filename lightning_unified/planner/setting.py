"""How the memory options of a step are set."""

from dataclasses import dataclass

from lightning_unified.nn.recomputing import RecomputePolicy

__all__ = ["Setting"]

_KEPT_AGAIN = 0.8  # judgement: of a block's forward pass, what runs again when its attention's output is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the memory options are set.

    Attributes:
        recompute: What is recomputed; None leaves the module as it is.
        precision: Lightning's name.
        optimizer_kernel: `"fused"`, `"foreach"`, `"for-loop"`; None leaves the optimizer as it was built.
        loss_chunk: Rows of logits at once; None leaves the module as it is.
    """

    precision: str
    recompute: RecomputePolicy | None = None
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None

    @property
    def changes(self) -> int:
        """How many memory options are not as the user left them."""
        recomputes = self.recompute is not None and self.recompute.blocks != 0
        return recomputes + (self.optimizer_kernel is not None) + (self.loss_chunk is not None)

    @property
    def again(self) -> float:
        """The share of the blocks that runs again in the backward pass."""
        policy = self.recompute
        if policy is None or policy.blocks == 0:
            return 0.0
        share = 1.0 if policy.blocks == "all" or not policy.of else policy.blocks / policy.of
        return share * (_KEPT_AGAIN if policy.keep_attention else 1.0)
