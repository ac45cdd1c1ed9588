"""Decide whether more rows of a step fit at once, by the memory that fewer rows took.

A check that runs a whole batch must not push a machine into swap. CUDA's and MPS's allocators have a cap: beyond it they raise an error, which
the check catches. Nothing stops a process on a CPU, so there the check measures fewer rows first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_unified.cost_model.memory.static import tensor_bytes
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.split import tensors_in

__all__ = ["NEGLIGIBLE", "MeasuredRoom"]

NEGLIGIBLE = 2000
"""Judgement: upper bound of a step's bytes over those of its weights, gradients, state and batch."""


class MeasuredRoom:
    """The memory that is left for more rows of a step without gradients.

    Args:
        watch: The budget, and the counters of the device's pool.
        module: The module whose step runs.
        device: The device of the module.

    Attributes:
        is_capped: Whether the device's allocator raises an error where memory runs out.
    """

    def __init__(self, watch: BudgetWatch, module: torch.nn.Module, device: torch.device) -> None:
        self._watch, self._module = watch, module
        self.is_capped = device.type in ("cuda", "mps")
        self._taken: tuple[int, int] | None = None  # rows, and the bytes that they took

    def is_ample(self, batch: Any) -> bool:
        """Return whether any rows of `batch` may be tried.

        They may if the allocator has a cap, or if the budget is thousands of times the bytes of weights and batch.
        """
        if self.is_capped:
            return True
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_in(batch)]
        return NEGLIGIBLE * sum(tensor_bytes(one) for one in held if not is_lazy(one)) <= self._watch.bytes

    def release(self) -> None:
        """Release cached memory, after memory ran out."""
        self._watch.release()

    @contextmanager
    def measuring(self, rows: int) -> Iterator[None]:
        """Measure the memory that the run of `rows` rows inside the block takes."""
        self._watch.release()  # freed memory that the run takes again would not be measured
        before = self._watch.reading().allocated.bytes if self._watch.next_peak().bytes is not None else None
        self._taken = None
        yield
        peak = self._watch.next_peak().bytes
        self._taken = None if peak is None or before is None else (rows, max(peak - before, 0))

    def fits(self, rows: int) -> bool:
        """Return whether `rows` rows fit, whose memory grows with the square of their number at most.

        They do not fit where nothing was measured.
        """
        room, now = self._watch.room(), self._watch.reading().allocated.bytes
        if self._taken is None or room is None or now is None:
            return False
        known, taken = self._taken
        return taken * (rows / known) ** 2 <= room - now
