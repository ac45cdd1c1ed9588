"""Run a reduction beside the end of the backward pass on the device.

The host queues a backward pass faster than the device runs it. When all ranks have queued theirs, no rank can run out of memory in it any
more, and much of it still waits on the device. A reduction on a stream of its own, which waits for one gradient only, runs meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["GradientMarks", "Overlap"]


class GradientMarks:
    """A mark for each gradient, made when autograd last added to it.

    Gradients are not kept alive.

    Args:
        parameters: The parameters whose gradients are marked. Those without `requires_grad` are left out.
        mark: Makes a mark, on the stream on which autograd has queued the addition.
    """

    def __init__(self, parameters: Sequence[Tensor], mark: Callable[[], Any]) -> None:
        self._marks = WeakTensorKeyDictionary()
        # autograd makes these nodes anew, without hooks, once nothing refers to them
        trained = [one for one in parameters if one.requires_grad]
        self._nodes = [get_gradient_edge(one).node for one in trained]
        for node, one in zip(self._nodes, trained, strict=True):
            node.register_hook(partial(_note, self._marks, mark, one))

    def of(self, gradient: Tensor) -> Any | None:
        """Return the mark of a gradient; None if there is none, or if anything has written the gradient since."""
        version, mark = self._marks.get(gradient, None) or (None, None)
        return mark if version == gradient._version else None


def _note(
    marks: WeakTensorKeyDictionary, mark: Callable[[], Any], parameter: Tensor, _of_inputs: object, _of_outputs: object
) -> None:
    gradient = parameter.grad
    if gradient is not None:
        marks[gradient] = (gradient._version, mark())


class Overlap:
    """A CUDA stream for reductions that begin before the backward pass has ended on the device.

    Args:
        parameters: The parameters whose gradients a reduction may begin with.
        device: Their device.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._marks = GradientMarks(parameters, partial(_event, device))

    @contextmanager
    def running(self) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Run on the stream inside the block; afterwards the present stream waits for it.

        The block gets a function that makes the stream wait until given gradients are complete. It waits for all work queued so far if
        they have no mark. Other memory that the present stream uses must not be written in the block: its last use may still be queued.
        """
        present = torch.cuda.current_stream(self._device)

        def complete(gradients: Sequence[Tensor]) -> None:
            for gradient in gradients:
                mark = self._marks.of(gradient)
                self._stream.wait_event(present.record_event() if mark is None else mark)

        try:
            with torch.cuda.stream(self._stream):
                yield complete
        finally:
            present.wait_stream(self._stream)


def _event(device: torch.device) -> Any:
    """Return an event at the end of the present stream's queue."""
    return torch.cuda.current_stream(device).record_event()
