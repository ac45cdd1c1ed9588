"""Count live tensors below autograd, as the memory of a simulated device.

Every storage that an operation makes on the CPU counts as the device's until it dies.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.hardware.allocators.engine_sums import first_term
from lightning_unified.hardware.allocators.pools import Block
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator
from lightning_unified.hardware.simulated.command_queue import CommandQueue
from lightning_unified.hardware.simulated.storage_blocks import StorageBlocks

__all__ = ["KernelMemory", "LiveTensors"]


class KernelCall(Protocol):
    """The memory events of one call of a kernel on the simulated device."""

    @property
    def shrinks(self) -> bool:
        """Whether the CPU's kernel keeps more memory for its result than the device's."""
        ...

    def replay(
        self,
        results: Sequence[Tensor],
        *,
        enter: Callable[[Tensor], Any],
        take: Callable[[int], Block],
        give: Callable[[Block], None],
    ) -> Any:
        """Call `enter`, `take` and `give` for results and other blocks in the kernel's order.

        `enter` gets each result; `take` and `give` get each block beside the results.
        """


class KernelMemory(Protocol):
    """The memory inside kernels, such as `cost_model.backends.hidden_bytes`."""

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, *, backend: str) -> KernelCall:
        """Return the memory events of a call that has returned."""
        ...


_LIBRARIES = (__name__.partition(".")[0], "torch", "lightning")


class LiveTensors(TorchDispatchMode):
    """Place every storage made on the CPU in a simulated allocator, which may raise.

    A storage counts once, whatever its views, from the operation that made it until nothing holds it, autograd's saved
    tensors included. A storage that existed before counts from `hold`, or from the first operation in which it meets a
    parameter or a gradient, because there everything must be on the device. It counts with the tensor's own size, so rows of
    a large data set do not count as the data set.

    Sums of gradients have the memory of their first term, as without a dispatch mode (`engine_sums.py`). Memory that a kernel takes and
    frees inside counts as far as `kernels` knows it. Not counted is memory that compiled code takes past the dispatcher. A forked
    child process counts nothing.

    Args:
        allocator: The simulated allocator.
        queue: The simulated command queue, which runs the operations.
        kernels: The memory inside the device's kernels; None counts none.

    Attributes:
        peak_place: Operation that led to the allocator's peak, and the line that called it.
        elsewhere: Types of real devices used meanwhile; tensors there do not count.
    """

    def __init__(
        self, allocator: SimulatedAllocator, queue: CommandQueue, *, kernels: KernelMemory | None = None
    ) -> None:
        super().__init__()
        self._allocator, self._queue, self._kernels = allocator, queue, kernels
        self._process, self._is_paused = os.getpid(), False
        self._blocks = StorageBlocks(allocator)
        self._makes: dict[Any, bool] = {}
        self.peak_place = "tensors made before the first operation"
        self.elsewhere: set[str] = set()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._is_paused or os.getpid() != self._process:
            return func(*args, **kwargs)
        self._blocks.settle()
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
            self._count_call(func, args, kwargs, result, inputs)
            if self._allocator.peak > peak:
                self.peak_place = _place(func)
        return result

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count existing tensors that do not count yet, each with its own bytes."""
        for tensor in tensors:
            storage = self._storage(tensor)
            if storage is not None and self._blocks.bytes_of(storage) is None:
                self._blocks.count(storage, min(storage.nbytes(), _own_bytes(tensor)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the host compute inside the block: what is made there does not count."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def forget(self) -> None:
        """Stop counting all tensors: the process gives the device up, though the tensors live on."""
        self._blocks.forget()

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

    def _count_call(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> None:
        """Count the results of a call, and the memory inside its kernel, in the kernel's order."""
        results = [tensor for tensor in _tensors((result,)) if self._storage(tensor) is not None]
        if not results:  # fake tensors: a plan is made while the run goes on
            return
        term = first_term(func, args)
        if term is not None and self._count_sum(results[0], term):
            return
        if self._kernels is None:
            for tensor in results:
                self._count_made(tensor, inputs)
            return
        call = self._kernels(func, args, kwargs, result, backend=self._allocator.profile.backend)
        enter = partial(self._count_made, inputs=inputs, shrinks=call.shrinks)
        call.replay(results, enter=enter, take=self._allocator.allocate, give=self._allocator.free)

    def _count_sum(self, result: Tensor, term: Tensor) -> bool:
        """Count a sum of gradients; return False if it cannot have its first term's block."""
        storage, of_term = self._storage(result), self._storage(term)
        if storage is None or of_term is None or self._blocks.bytes_of(of_term) != storage.nbytes():
            return False
        self._blocks.count_sum(storage, of_term)
        return True

    def _count_made(self, tensor: Tensor, inputs: list[Tensor], *, shrinks: bool = False) -> None:
        storage = self._storage(tensor)
        if storage is None:
            return
        known = self._blocks.bytes_of(storage)
        if known is None:
            others = (self._storage(other) for other in inputs)
            if all(
                other is None or other._cdata != storage._cdata for other in others
            ):  # otherwise a view of a storage that does not count
                self._blocks.count(storage, min(storage.nbytes(), _own_bytes(tensor)) if shrinks else storage.nbytes())
        elif storage.nbytes() != known:  # resized in place
            self._blocks.drop(storage)
            self._blocks.count(storage, storage.nbytes())


def _own_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
    """Return whether an operation can return new or resized memory, not only views of inputs."""
    schema = getattr(func, "_schema", None)
    return schema is None or "resize" in schema.name or any(each.alias_info is None for each in schema.returns)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, also in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
