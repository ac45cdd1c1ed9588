"""One attempt at a step, and how to undo it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_unified.errors import HalfUpdatedError
from lightning_unified.step.loop.closure import ZeroGrad
from lightning_unified.step.recovery.renormed import RenormedRows
from lightning_unified.step.recovery.snapshot import CopiedGradients, HeldGradients, StepSnapshot
from lightning_unified.step.recovery.weights import WeightsCopy, WeightsWatch

__all__ = ["Attempt"]

_HALF_UPDATED = (
    "memory ran out while the optimizer was writing weights, and some are written already; the run stops here so that no "
    "half-updated weight is ever saved. Resume from the last checkpoint with an optimizer that needs no temporaries "
    "(fused=True), a smaller memory.micro_batch_size, or optimizer_rollback=True, which keeps a copy to go back to."
)


class Attempt:
    """The state, gradients and weights before one attempt at a step.

    Args:
        snapshot: All other state, and the batch.
        parameters: The trained parameters, whose gradients a backward pass writes.
        within_window: Whether there are gradients of earlier batches, which no `zero_grad` drops.
        copies_weights: Whether weights are copied before the optimizer writes them, and not only watched.

    Attributes:
        snapshot: The argument.
        written: The trained parameters that an undone attempt had written before the optimizer step. They keep what it wrote.
        gradients: The gradients of the window's earlier batches.
        copied: Copies of the gradients of tensors that no optimizer of the Trainer has.
        zeroing: Zero the gradients of this batch, one for each run of the closure; none within a window.
        renormed: The rows of embeddings that the attempt scales in place. The attempt runs inside this block.
    """

    def __init__(
        self, snapshot: StepSnapshot, parameters: Sequence[Tensor], *, within_window: bool, copies_weights: bool
    ) -> None:
        self.snapshot = snapshot
        self.gradients = HeldGradients(parameters, within_window=within_window)
        self.copied = CopiedGradients(snapshot.state.leaves, apart_from=parameters, device=snapshot.device)
        self.zeroing: list[ZeroGrad] = []
        self.renormed = RenormedRows()
        self.written: list[Tensor] = []
        self._versions = [(one, one._version) for one in parameters if one.requires_grad]
        self._copies_weights = copies_weights
        self._weights: WeightsWatch | WeightsCopy | None = None

    def before_weights(self, optimizer: Optimizer) -> None:
        """Record weights and optimizer state before they are written.

        If an optimizer runs its closure again, its first record is kept, because it has written already.
        """
        if self._weights is None:
            self._note_written()
            self._weights = (WeightsCopy if self._copies_weights else WeightsWatch)(optimizer)

    def _note_written(self) -> None:
        moved = (one for one, version in self._versions if one._version != version)
        self.written = [one for one in moved if not self.renormed.wrote(one)]

    def restore_weights(self) -> bool:
        """Restore weights and optimizer state.

        Return False if some are written and cannot be restored.
        """
        return self._weights is None or self._weights.restore()

    def undo(self) -> Any:
        """Undo the attempt, weights first, and return the batch for the next one.

        Raises:
            HalfUpdatedError: If weights cannot be restored.
        """
        if not self.restore_weights():
            raise HalfUpdatedError(_HALF_UPDATED)
        if self._weights is None:
            self._note_written()
        self.renormed.restore()
        self.gradients.restore()
        for zeroing in reversed(self.zeroing):
            zeroing.undo()
        self.copied.restore()
        return self.snapshot.undo()
