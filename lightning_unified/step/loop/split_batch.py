"""A batch as the closure runs it: whole, or split with its results merged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.nn.cuda_graphs import no_new_recordings
from lightning_unified.step.exactness.facts.bends import LossBends
from lightning_unified.step.exactness.facts.decisions import BatchDecisions
from lightning_unified.step.exactness.facts.graph import GraphFact, stop_gradients
from lightning_unified.step.exactness.facts.levels import Levels
from lightning_unified.step.exactness.gradients import are_finite, size_of
from lightning_unified.step.exactness.losses import Weighting
from lightning_unified.step.exactness.parameters.earlier_gradients import copies_of_gradients, put_gradients
from lightning_unified.step.loop.outside_writes import OutsideWrites
from lightning_unified.step.loop.small_parameters import SmallParameters
from lightning_unified.step.loop.split_results import SplitResults
from lightning_unified.step.loop.split_summands import SplitSummands
from lightning_unified.step.results.kept_gradients import awaits_gradient
from lightning_unified.step.split.containers import tensors_in

__all__ = ["SplitBatch", "WholeBatch"]


class WholeBatch:
    """A batch that runs as Lightning runs it."""

    count = 1

    def __init__(self, step: Callable[[], ClosureResult]) -> None:
        self._step = step

    def begin(self, _leaves: Sequence[Tensor]) -> None:
        """Do nothing: a whole batch has nothing to merge."""

    def step(self, _index: int, *, in_window: bool) -> ClosureResult:  # noqa: ARG002  # Lightning's own order
        """Run `training_step`."""
        return self._step()

    def recording(self) -> AbstractContextManager[None]:
        """Leave `self.log` unchanged."""
        return nullcontext()

    def end_micro_batch(self) -> None:
        """Do nothing: state that the step wrote is already the batch's."""

    def keeping(self) -> Sequence[Tensor]:
        """Return no tensors: gradients are already the batch's."""
        return ()

    def begin_backward(self) -> None:
        """Do nothing: state of a whole batch is not merged."""

    def end_backward(self) -> None:
        """Do nothing: gradients are already the batch's."""

    def settle(self) -> None:
        """Do nothing: state that the step wrote is already the batch's."""

    def share(self, _index: int) -> float | None:
        """Return None: the loss is the batch's own."""
        return None

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the one result."""
        return outputs[0]


class SplitBatch:
    """A batch that runs as `count` micro-batches.

    Args:
        steps: One function for each micro-batch, which runs `training_step` on it.
        weighting: The weights of the micro-batches.
        merging: Merges their results.
        parameters: The parameters of module and optimizers. A step that computes gradients of its own must not change those of earlier
            micro-batches.
        outside: Notes what the steps write outside the module.
        see_graph: Gets the graph of the first micro-batch's loss, or None without a loss, when the state from before the batch is restored.
        see_bends: Gets the bends of all micro-batches' losses, when that state is restored before the update.
        is_checked: Whether these two want to see anything.
        is_decided: Whether a check could compare gradients so far. If not, the first micro-batch that has one is noted.
        summands: Weights the summands of the loss, if each has weights of its own.
        levels: The levels of logged and returned numbers in the batches before.
        decisions: Runs the steps, and notes how they decide by values.
        reads_gradients: Whether the step reads gradients of the batch before, of which each micro-batch then gets copies.
    """

    def __init__(
        self,
        steps: Sequence[Callable[[], ClosureResult]],
        weighting: Weighting,
        *,
        merging: SplitResults,
        parameters: Sequence[Tensor],
        outside: OutsideWrites,
        see_graph: Callable[[GraphFact | None], None],
        see_bends: Callable[[LossBends], None],
        is_checked: bool,
        levels: Levels,
        decisions: BatchDecisions,
        reads_gradients: bool = False,
        is_decided: bool = True,
        summands: SplitSummands | None = None,
    ) -> None:
        self.count = len(steps)
        self._steps, self._weighting, self._merging = steps, weighting, merging
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._outside, self._is_checked = outside, is_checked
        self._see_graph, self._see_bends = see_graph, see_bends
        self._graph: GraphFact | None = None
        self._bends: LossBends | None = LossBends()
        self._levels, self._decisions = levels, decisions
        self._small = SmallParameters(self._parameters if is_checked else ())
        self._others: list[tuple[Tensor, Tensor | None]] = []
        self._returned: list[tuple[Tensor, Tensor]] = []
        self._index, self._reads_gradients, self._summands = 0, reads_gradients, summands
        self._earlier: Sequence[Tensor | None] = ()
        self._notes_moving, self._size, self._ended = is_checked and not is_decided, 0.0, 0

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Start over, with the tensors besides these parameters that get gradients."""
        known = {*map(id, self._parameters)} if leaves else ()
        others = [leaf for leaf in leaves if id(leaf) not in known]
        self._others = [(leaf, None if leaf.grad is None else leaf.grad.clone()) for leaf in others]
        self._earlier = copies_of_gradients(self._parameters) if self._reads_gradients else ()
        self._merging.begin()
        if self._summands is not None:
            self._summands.begin()
        self._outside.begin()
        self._small.begin()
        self._ended, self._graph = 0, None
        self._bends = LossBends(self._levels)

    def step(self, index: int, *, in_window: bool) -> ClosureResult:
        """Run `training_step` on one micro-batch.

        A micro-batch without a loss term has no loss, but a backward pass with gradients of zero: in the whole batch its rows' parameters
        have such gradients, not None, so that optimizers update them. Ranks that hold shards need each other's passes too.

        Args:
            index: The number of the micro-batch.
            in_window: Whether there are gradients of earlier batches of an accumulation window. Otherwise Lightning
                zeroes all gradients after the whole batch's step, even if the step itself changed them.

        Raises:
            SplitError: If the step changes gradients of earlier batches.
        """
        with self._merging.micro_batch(index), self._gradients_aside(index, in_window=in_window):
            if index == 1 and self._is_checked:
                self._see_graph(self._graph)
            noting = nullcontext() if self._summands is None else self._summands.noting()
            with self._outside.micro_batch(index), noting:
                output = self._decisions.run(index, self._steps[index])
        self._note(index, output)
        if self._summands is not None and output.closure_loss is not None:
            output.loss = self._summands.weigh(index, output.closure_loss)
        lacks_terms = output.closure_loss is not None and self._weighting.has_loss_of_nothing(
            index, output.closure_loss
        )
        if lacks_terms and self._bends is not None:
            self._bends.add_lacking(index)
        if index == 0:
            self._small.note()
        returned, output.extra = output.extra, recursive_detach(output.extra)  # the graph must end with the micro-batch
        pairs = zip(tensors_in(returned), tensors_in(output.extra), strict=True)
        self._returned = [(one, detached) for one, detached in pairs if awaits_gradient(one)]
        self._index = index
        if self.share(index) == 0:
            output.loss = None
            if output.closure_loss is not None:
                stop_gradients(output.closure_loss)
        return output

    def _note(self, index: int, output: ClosureResult) -> None:
        """Note the graph of a micro-batch's loss while it exists, and the numbers beside it."""
        loss = output.closure_loss
        if not self._is_checked or loss is None or self._bends is None or (index and self.share(index) == 0):
            return
        weights = self._weighting.weights
        numbers = self._merging.numbers(index, output.extra)
        graph = self._bends.add(loss, rows=weights.rows[index], terms=weights.terms[index], numbers=numbers)
        if index == 0:
            self._graph = graph

    @contextmanager
    def _gradients_aside(self, index: int, *, in_window: bool) -> Iterator[None]:
        """Protect earlier gradients from a step that runs backward or `zero_grad` itself.

        A CUDA graph would be recorded while these gradients are held twice.
        """
        if index == 0 and not in_window:
            yield
            return
        held = [parameter.grad for parameter in self._parameters]
        if index == 0:
            versions = [None if gradient is None else gradient._version for gradient in held]
            with no_new_recordings():
                yield
            now = [parameter.grad for parameter in self._parameters]
            if not all(map(_is_untouched, held, versions, now)):
                raise SplitError(
                    "training_step changes gradients itself (backward or zero_grad) in an accumulation window, where a split batch would do so "
                    "once a micro-batch. Use torch.autograd.grad in the step, accumulate_grad_batches=1, or MicroBatchRules(splittable=False)."
                )
            return
        earlier = [None if one is None else one.clone() for one in self._earlier]
        put_gradients(self._parameters, earlier or [None] * len(self._parameters))
        of_others = [(leaf, leaf.grad) for leaf, _ in self._others]
        for leaf, before in self._others:  # the step may read or drop the gradient from before the batch
            leaf.grad = None if before is None else before.clone()
        try:
            with no_new_recordings():
                yield
        finally:
            for one, gradient in [*zip(self._parameters, held, strict=True), *of_others]:
                one.grad = gradient

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hold back the values that are logged inside the block, and note what its code decides."""
        with self._merging.recording(), self._decisions.backward():
            yield

    def end_micro_batch(self) -> None:
        """Record the state that a micro-batch's step wrote, before the hooks that run once a batch."""
        self._merging.end_micro_batch()

    def keeping(self) -> Sequence[Tensor]:
        """Return the tensors that keep their gradient of the micro-batch's backward pass.

        They are outputs, written state and rows of the batch.
        """
        returned = [one for one, _ in self._returned]
        return [*returned, *self._merging.keeping(), *self._outside.keeping(self._index)]

    def begin_backward(self) -> None:
        """Restore the state that the micro-batch's step wrote, if it was merged before the backward pass."""
        if self._notes_moving:
            self._size = size_of(one.grad for one in self._parameters)
        self._merging.begin_backward()

    def end_backward(self) -> None:
        """End the graph of outputs, with the gradients that they keep, and record the state that was written."""
        for one, detached in self._returned:
            detached.grad = one.grad
        self._returned = []
        self._merging.end_backward()
        self._ended += 1
        if self._notes_moving and self._bends is not None and self._bends.moving is None:
            size = size_of(one.grad for one in self._parameters)
            self._bends.moving = self._index if isfinite(size) and size != self._size else None

    def settle(self) -> None:
        """Write the merged state, before the hooks that follow the step."""
        bends, self._bends = self._bends, None
        if bends is not None and self._is_checked:
            bends.waiting = self._ended if self._ended < self.count else None  # with a late `zero_grad`
            bends.add_written(self._merging.written_numbers())
            if bends.may_hide and not are_finite(one.grad for one in self._parameters):
                bends.add_not_finite()
            places = self._small.written()
            bends.add_parameters(places)
            weights = self._weighting.weights
            bends.add_decided(self._decisions.facts([*zip(weights.terms, weights.rows, strict=True)]))
            for index in [] if self._summands is None else [*self._summands.unknown(), *self._summands.lacking()]:
                bends.add_lacking(index)
            with self._merging.state_before(), self._small.as_before() if places else nullcontext():
                self._see_bends(bends)
            if self._summands is not None:
                self._summands.require_known()
        self._merging.settle(self._weighting.weights_of_results)

    def share(self, index: int) -> float | None:
        """Return the factor of the micro-batch's loss; None if the loss is already its share."""
        return self._weighting.share(index) if self._summands is None else 1.0

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the whole batch's result, and write the logs that were held back."""
        extra = self._merging.finish([output.extra for output in outputs], self._weighting.weights_of_results)
        loss = self._weighting.loss([output.loss for output in outputs])
        self._outside.finish(outputs, {**extra, "loss": loss})
        return ClosureResult(loss, extra=extra)


def _is_untouched(before: Tensor | None, version: int | None, now: Tensor | None) -> bool:
    """Return whether a gradient is unchanged.

    It may have moved to other memory, as gradients of recorded CUDA graphs do.
    """
    if before is None or now is None:
        return before is now
    return before._version == version and (before is now or torch.equal(before, now))
