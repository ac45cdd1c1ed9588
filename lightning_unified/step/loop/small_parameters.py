"""Notice that a step writes small trained parameters, such as the temperature that it clamps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["SmallParameters"]

_LARGEST = 64  # entries of a parameter; larger ones would cost time and memory
_MOST = 64  # parameters


class SmallParameters:
    """The small trained parameters before a batch's first micro-batch, and which of them its step has written.

    A clamp after a parameter's use does nothing in most batches. In the batch where it does, later micro-batches would compute with the
    clamped value. A check can tell such a write from one before the use, but only with the values from before the batch.

    Args:
        parameters: The trained parameters.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        small = [(index, one) for index, one in enumerate(parameters) if _is_small(one)][:_MOST]
        kinds = dict.fromkeys((one.device, one.dtype) for _, one in small)
        self._groups = [[pair for pair in small if (pair[1].device, pair[1].dtype) == kind] for kind in kinds]
        self._before: list[Tensor] = []
        self._differs: list[Tensor] = []
        self._sent: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Copy the values."""
        self._before, self._differs, self._sent = self._values(), [], []

    def note(self) -> None:
        """Compare the values, after the step of the first micro-batch; the host does not wait for the device."""
        for before, now in zip(self._before, self._values(), strict=True):
            differs = before != now
            self._differs.append(differs.to("cpu", non_blocking=True))
            if differs.is_cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(differs.device))
                self._sent.append(event)

    def written(self) -> list[int]:
        """Return the places of the written parameters among all trained ones."""
        for event in self._sent:
            event.synchronize()
        parts = (
            (index, part)
            for group, differs in zip(self._groups, self._differs, strict=False)
            for (index, _), part in zip(group, differs.split([one.numel() for _, one in group]), strict=True)
        )
        return [index for index, part in parts if bool(part.any())]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Hold the values from before the batch inside the block."""
        now = self._values()
        self._put(self._before)
        yield
        self._put(now)

    def _values(self) -> list[Tensor]:
        """Return copies of the values, one tensor for each device and format."""
        return [torch.cat([one.detach().flatten() for _, one in group]) for group in self._groups]

    def _put(self, values: Sequence[Tensor]) -> None:
        for group, flat in zip(self._groups, values, strict=True):
            for (_, one), part in zip(group, flat.split([one.numel() for _, one in group]), strict=True):
                one.data.copy_(part.view_as(one))  # moves no version counter, which a backward pass may still compare


def _is_small(parameter: Tensor) -> bool:
    is_small = 0 < parameter.numel() <= _LARGEST  # first, because few are
    return is_small and type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_meta
