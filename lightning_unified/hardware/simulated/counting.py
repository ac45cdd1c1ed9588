"""Count live tensors below autograd, as the memory of a simulated device.

Every storage that an operation makes on the CPU counts as the device's until it dies.
"""

import os
import sys
import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.hardware.allocators.pools import Block
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator
from lightning_unified.hardware.simulated.command_queue import CommandQueue

__all__ = ["LiveTensors"]


_LIBRARIES = (__name__.partition(".")[0], "torch", "lightning")


class LiveTensors(TorchDispatchMode):
    """While active, places every storage made on the CPU in a simulated allocator, which may raise.

    A storage counts once, whatever its views, from the operation that made it until nothing holds it, autograd's saved
    tensors included. A storage that existed before counts from `hold`, or from the first operation in which it meets a
    parameter or a gradient, because there everything must be on the device. It counts with the tensor's own size, so rows of
    a large data set do not count as the data set.

    Not counted: memory that a kernel takes and frees inside, and memory that compiled code takes past the dispatcher. A
    forked child process counts nothing.

    Args:
        allocator: The simulated allocator.
        queue: The simulated command queue, which runs the operations.

    Attributes:
        peak_place: Operation that led to the allocator's peak, and the line that called it.
        elsewhere: Types of real devices used meanwhile; tensors there do not count.
    """

    def __init__(self, allocator: SimulatedAllocator, queue: CommandQueue) -> None:
        super().__init__()
        self._allocator, self._queue = allocator, queue
        self._process = os.getpid()
        self._living: dict[int, tuple[weakref.ref[Any], Block, int]] = {}
        self._makes: dict[Any, bool] = {}
        self.peak_place = "tensors made before the first operation"
        self.elsewhere: set[str] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if os.getpid() != self._process:
            return func(*args, **kwargs)
        inputs = _tensors(args)
        if kwargs:
            inputs += _tensors(kwargs.values())
        if any(tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) for tensor in inputs):
            self.hold(inputs)
        result = self._queue.execute(func, args, kwargs)
        makes = self._makes.get(func)
        if makes is None:
            makes = self._makes[func] = _makes_storages(func)
        if makes:
            peak = self._allocator.peak
            for tensor in _tensors((result,)):
                self._count_made(tensor, inputs)
            if self._allocator.peak > peak:
                self.peak_place = _place(func)
        return result

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors that do not count yet, each with its own bytes."""
        for tensor in tensors:
            storage = self._storage(tensor)
            if storage is not None and storage._cdata not in self._living:
                self._count(storage, min(storage.nbytes(), tensor.numel() * tensor.element_size()))

    def forget(self) -> None:
        """Stop counting all tensors: the process gives the device up, though the tensors live on."""
        for key in list(self._living):
            _, block, _ = self._living.pop(key)
            self._allocator.free(block)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a dense tensor in host memory.

        The result is None for sparse, meta and fake tensors.
        """
        if tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        kind = storage.device.type
        if kind not in ("cpu", "meta"):
            self.elsewhere.add(kind)
        return storage if kind == "cpu" else None

    def _count_made(self, tensor: Tensor, inputs: list[Tensor]) -> None:
        storage = self._storage(tensor)
        if storage is None:
            return
        known = self._living.get(storage._cdata)
        if known is None:
            others = (self._storage(other) for other in inputs)
            if all(
                other is None or other._cdata != storage._cdata for other in others
            ):  # otherwise a view of a storage that does not count
                self._count(storage, storage.nbytes())
        elif storage.nbytes() != known[2]:  # resized in place
            self._drop(storage._cdata)
            self._count(storage, storage.nbytes())

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        if size:
            key = storage._cdata
            block = self._allocator.allocate(size)
            self._living[key] = weakref.ref(storage, partial(self._died, key)), block, storage.nbytes()

    def _died(self, key: int, _reference: Any) -> None:
        self._drop(key)

    def _drop(self, key: int) -> None:
        entry = self._living.pop(key, None)
        if entry is not None:
            self._allocator.free(entry[1])


def _place(func: Any) -> str:
    """Return an operation, the backward it runs in, and the innermost line of the user's code."""
    node = torch._C._current_autograd_node()
    name = f"{func}" if node is None else f"{func} in the backward of {node.name().removesuffix('Backward0')}"
    frame = sys._getframe(1)
    while frame is not None and _is_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return name if frame is None else f"{name}, {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


@cache
def _is_library(module: str) -> bool:
    """Return whether a module's lines are hidden.

    A package that says `SHOWS_ITS_LINES` is treated like a user's.
    """
    top, _, rest = module.partition(".")
    package = sys.modules.get(f"{top}.{rest.partition('.')[0]}")
    return top in _LIBRARIES and not getattr(package, "SHOWS_ITS_LINES", False)


def _makes_storages(func: Any) -> bool:
    """Return whether an operation can return new or resized memory, not only views of its inputs."""
    schema = getattr(func, "_schema", None)
    return schema is None or "resize" in schema.name or any(each.alias_info is None for each in schema.returns)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, through nested lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
