"""Plan for rows of another length, from the traces of known lengths."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from lightning_unified.cost_model.candidates import even_splits
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.planner.dry_run.fake_batch import row_length
from lightning_unified.planner.other_phases import outline
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape, tensors_in

__all__ = ["ROOM", "LongerLengths", "PlannedLengths", "is_padded"]

ROOM = 0.05
"""Share of the budget that a plan of padded batches leaves for longer rows.

Judgement. Without it, the next batch whose longest row is a few entries longer would need another plan.
"""

_STEPS = 32  # judgement: planned lengths between a power of two and the next; a length counts as the next longer one


@dataclass(frozen=True, slots=True)
class _Settings:
    """The conditions of the traces: memory options, and the parameters that get gradients."""

    recompute: Any
    loss_chunk: Any
    kernel: Any
    attention: Any
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, policy: MemoryPolicy, module: Any) -> "_Settings":
        options = policy.applied_options
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        return cls(
            policy.recomputation.policy, options.loss_chunk, options.optimizer_kernel, options.attention, trained
        )


class PlannedLengths:
    """Micro-batch sizes of a fit by row length, under the memory options of its plan.

    Args:
        planner: The planner of the batch that was planned; it keeps the traces.
        combination: The memory options that are set.
        module: The module as the fit runs it.

    Attributes:
        largest: The prediction with the most reserved bytes; None before the first length.
    """

    def __init__(self, planner: Planner, combination: Combination, *, policy: MemoryPolicy, module: Any) -> None:
        self._planner, self._policy, self._module = planner, policy, module
        self._steps = planner.lengths(combination)
        self._settings = _Settings.of(policy, module)
        self._found: dict[tuple[int, int], Prediction | None] = {}
        self.largest: Prediction | None = None

    @property
    def hold(self) -> bool:
        """Whether the memory options and the trained parameters are still those of the traces."""
        return _Settings.of(self._policy, self._module) == self._settings

    def plan(self, batch: Any, shape: BatchShape, *, limit: int) -> tuple[Prediction | None, bool]:
        """Return the prediction for the fewest micro-batches within `limit` bytes, and if it is new.

        The prediction is None if no size fits, or if rows have no length.

        Raises:
            MisalignedError: If the step is no function of its rows and their length.
            DryRunError: If a size cannot be traced.
        """
        length = row_length(batch, shape.rows)
        if length is None:
            return None, False
        if not self._steps.is_known:
            light = outline(batch)
            self._steps.learn(batch if light is None else light, length=length)
        key = shape.rows, self._steps.aligned(_rounded_up(length))
        is_new = key not in self._found
        if is_new:
            row_bytes = sum(one.numel() * one.element_size() for one in tensors_in(batch)) // shape.rows
            self._found[key] = self._searched(*key, row_bytes=-(-row_bytes * key[1] // length), limit=limit)
        found = self._found[key]
        if found is not None and (self.largest is None or found.reserved_bytes > self.largest.reserved_bytes):
            self.largest = found
        return found, is_new

    def _searched(self, rows: int, length: int, *, row_bytes: int, limit: int) -> Prediction | None:
        steps, allowed = self._steps, self._policy.sizes
        sizes = steps.sizes(length, rows=rows, row_bytes=row_bytes)
        splits = even_splits(rows, unit=steps.unit, least=allowed.least, micro_batch_size=allowed.max_micro_batch_size)
        for split in splits:
            if sizes.peak_bytes(split[0], num_micro_batches=2) > limit:
                continue
            found = self._planner.within(
                sizes.exactly(split[0], num_micro_batches=2), num_micro_batches=len(split), limit=limit
            )
            if found is not None:
                return found
        return None


class LongerLengths:
    """Longer rows of a fit whose batches run at once, under the memory options of its plan.

    Its arguments and attributes are those of `PlannedLengths`.
    """

    def __init__(self, planner: Planner, combination: Combination, *, policy: MemoryPolicy, module: Any) -> None:
        self._planner, self._policy, self._module = planner, policy, module
        self._steps = planner.longer(combination)
        self._settings = _Settings.of(policy, module)
        self.largest: Prediction | None = None

    @property
    def hold(self) -> bool:
        """Whether the memory options and the trained parameters are still those of the traces."""
        return _Settings.of(self._policy, self._module) == self._settings

    def plan(self, batch: Any, shape: BatchShape, *, limit: int) -> tuple[Prediction | None, bool]:
        """Return the prediction for the batch at once, and that it is new.

        The prediction is None if it does not fit within `limit` bytes, or if the planned batch tells nothing of it: it has other rows.

        Raises:
            MisalignedError: If the step is no function of its rows and their length.
            DryRunError: If a length cannot be traced.
        """
        steps, length, allowed = self._steps, row_length(batch, shape.rows), self._policy.sizes.max_micro_batch_size
        if length is None or length <= steps.planned or shape.rows != steps.rows:
            return None, False
        if allowed is not None and allowed < shape.rows:
            return None, False
        light = outline(batch)
        light = batch if light is None else light
        row_bytes = sum(one.numel() * one.element_size() for one in tensors_in(batch)) // shape.rows
        longest = steps.completed(steps.reaching(length, up_to=_rounded_up(length)), row_bytes=row_bytes)
        fits = self._planner.within(longest, num_micro_batches=1, limit=limit) is not None
        trace = (steps.within_reach if fits else steps.own)(light, length=length)
        trace = steps.completed(trace, row_bytes=row_bytes)
        found = self._planner.within(trace, num_micro_batches=1, limit=limit)
        if found is not None and (self.largest is None or found.reserved_bytes >= self.largest.reserved_bytes):
            self.largest = found
        return found, True


def is_padded(batch: Any, rows: int) -> bool:
    """Return whether the rows of a batch are padded to its longest one, as far as a mask of the rows tells.

    A mask has the entries 0 and 1. Its longest row has no 0, and another row has some.
    """
    length = row_length(batch, rows)
    masks = [
        one
        for one in tensors_in(batch)
        if not one.is_nested and one.shape == (rows, length) and not (one.is_floating_point() or one.is_complex())
    ]
    return any(_is_padded(mask.detach().cpu().numpy()) for mask in masks)  # numpy takes no memory of the device


def _is_padded(mask: "NDArray[Any]") -> bool:
    is_set = mask != 0
    counts = is_set.sum(1)
    is_mask = bool((mask == is_set).all())
    return is_mask and counts.min() < counts.max() == mask.shape[1]


def _rounded_up(length: int) -> int:
    """Return the next of `_STEPS` lengths per power of two, so that few lengths need a search."""
    step = max((1 << (length.bit_length() - 1)) // _STEPS, 1)
    return -(-length // step) * step
