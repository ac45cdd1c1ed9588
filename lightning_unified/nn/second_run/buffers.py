"""Buffers that a block writes, such as the statistics of BatchNorm."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ["Buffers"]


class Buffers:
    """Values of a block's buffers before its first run, used again in the second."""

    def __init__(self, block: nn.Module) -> None:
        self._slots = [
            (module, name, value)
            for module in block.modules()
            for name, value in module._buffers.items()
            if value is not None
        ]
        self._before = [value.detach().clone() for value in _each_once(value for _, _, value in self._slots)]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Swap the block's buffers for copies of the old values inside the context.

        Copying the values back would count as a write and invalidate tensors that autograd saved.
        """
        # of TorchScript modules, `_buffers` has no method `get`
        current = [module._buffers[name] if name in module._buffers else None for module, name, _ in self._slots]  # noqa: SIM401
        originals = _each_once(value for _, _, value in self._slots)
        copies = {id(one): before.clone() for one, before in zip(originals, self._before, strict=True)}
        for module, name, value in self._slots:
            module._buffers[name] = copies[id(value)]
        try:
            yield
        finally:
            for (module, name, _), value in zip(self._slots, current, strict=True):
                module._buffers[name] = value


def _each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without repeats, so that a buffer shared by two modules stays one."""
    return list({id(tensor): tensor for tensor in tensors}.values())
