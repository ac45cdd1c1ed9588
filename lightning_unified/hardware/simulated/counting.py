"""Which tensors live, seen from below autograd: every storage that an operation makes on the CPU counts as the device's until it dies."""

import os
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.hardware.allocators.pools import Block
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator

__all__ = ["LiveTensors"]


_PACKAGE = Path(__file__).parents[2]
_OURS = [folder for folder in _PACKAGE.iterdir() if folder.is_dir() and folder.name not in ("models", "data")]
_OTHERS = [Path(str(spec.origin)).parent for spec in map(find_spec, ("torch", "lightning")) if spec is not None]
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (*_OURS, *_OTHERS))


class LiveTensors(TorchDispatchMode):
    """While active, places what operations make on the CPU in a simulated allocator, which may raise its out-of-memory error.

    A storage counts once, whatever views of it there are, from the operation that made it until nothing holds it, autograd's
    saved tensors included. What was there before counts from `hold`, or from the first operation in which it meets a parameter
    or a gradient: there everything must be on the device. It counts with its own size, so that rows out of a large data
    set are not the data set.

    Not seen: what a kernel takes and gives back inside itself, and what compiled code takes past the dispatcher. A child process
    that was forked meanwhile counts nothing.

    Args:
        allocator: Where tensors are placed.

    Attributes:
        peak_place: The operation that led to the allocator's peak, and the line it was called from.
        elsewhere: Types of real devices that were used meanwhile; what is on them does not count.
    """

    def __init__(self, allocator: SimulatedAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._process = os.getpid()
        self._living: dict[int, tuple[weakref.ref[Any], Block, int]] = {}
        self._makes: dict[Any, bool] = {}
        self.peak_place = "what was there before the first operation"
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
        result = func(*args, **kwargs)
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
        """Count tensors that exist already, each with its own bytes, as far as they do not count yet."""
        for tensor in tensors:
            storage = self._storage(tensor)
            if storage is not None and storage._cdata not in self._living:
                self._count(storage, min(storage.nbytes(), tensor.numel() * tensor.element_size()))

    def forget(self) -> None:
        """Let nothing count that counts now: the device is given up, though the tensors live on."""
        for key in list(self._living):
            _, block, _ = self._living.pop(key)
            self._allocator.free(block)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a dense tensor in host memory; None for one that has none: sparse, meta, fake."""
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
            ):  # else a view of what does not count
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
    """Return an operation's name, in whose backward it runs, and the innermost line that is neither torch's nor ours."""
    node = torch._C._current_autograd_node()
    name = f"{func}" if node is None else f"{func} in the backward of {node.name().removesuffix('Backward0')}"
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return name if frame is None else f"{name}, {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _makes_storages(func: Any) -> bool:
    """Return whether an operation can return new memory, or memory of another size: not one that only views or writes its inputs."""
    schema = getattr(func, "_schema", None)
    return schema is None or "resize" in schema.name or any(each.alias_info is None for each in schema.returns)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, which nest lists at most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
