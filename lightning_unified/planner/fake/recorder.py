"""The recorder: a dispatch mode that turns torch's operations into the events of a `Trace`.

The recorder sees every operation with its arguments and results, real or fake. It notes three kinds of events:

- `Work`: the operation, its module and phase, its floating-point operations and the bytes that it reads and writes;
- `Take`: a storage is allocated, with its bytes and category;
- `Give`: a storage is freed, at the moment when the last reference to it ends.

Memory that a backend's kernel takes without a tensor (`hidden_bytes`) is added as storages too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.cost_model.backends import Hidden, hidden_bytes
from lightning_unified.cost_model.trace.trace import Category, Collective, Event, Passes, Phase, Work
from lightning_unified.hardware.allocators.engine_sums import first_term, may_be_sum
from lightning_unified.planner.fake.flops import flops_of
from lightning_unified.planner.fake.known_values import are_wrapped, tensors_among
from lightning_unified.planner.fake.storages import Lives, Storage, Storages

__all__ = ["Recorder"]

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_COMPILED_CALL = 50
"""Launches that a call of a compiled graph costs the host besides its kernels.

They are guards, and torch's code around the graph. benchmarks/cost_model/host_time.py measures 24 for a block with one argument and a
constant number of rows. Judgement: 50 for calls in a step; with 28, the steps in benchmarks/options/blocks/compiled_blocks.json that waited
for the host took 1.3 to 1.5 times as long as predicted.
"""


class _Facts:
    """The constant properties of an operation."""

    __slots__ = ("can_be_sum", "flops", "is_marker", "is_view", "name")

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        self.can_be_sum = may_be_sum(func)
        self.is_marker = self.name.startswith(("profiler.", "prim."))
        self.is_view: bool = bool(getattr(func, "is_view", False))
        self.flops = flops_of(func)


class Recorder(TorchDispatchMode):
    """Notes the operations and allocations between `begin` and `stop`.

    A storage's category is known only at the end. Callers mark weights, gradients, optimizer state, buffers and the batch. A storage that
    a forward pass makes and its backward pass still finds is an activation, or logits if one of its dimensions is a vocabulary. All
    others are temporaries.

    Sums of gradients differ under a dispatch mode, and are noted as they run without one (`hardware/allocators/engine_sums.py`).

    Args:
        widths: Sizes of dimensions that mark a tensor as logits.
        known: Returns the result of a call without dispatching it, or `NotImplemented`; None dispatches every call.

    Attributes:
        phase: The phase of the operations that follow.
        storages: The live storages and the events.
    """

    def __init__(
        self,
        *,
        backend: str,
        place: Callable[[], str] = str,
        widths: Iterable[int] = (),
        known: Callable[[Any, Any, Mapping[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._known = known
        self.phase: Phase = "setup"
        self._backend, self._place = backend, place
        self.storages = Storages(widths)
        self._facts: dict[Any, _Facts] = {}
        self._works: dict[Any, Work] = {}
        self._is_paused = False
        self._times = 1.0

    @contextmanager
    def repeated(self, times: float) -> Iterator[None]:
        """Count the operations inside the block `times` times; their allocations count once."""
        before, self._times = self._times, times * self._times
        try:
            yield
        finally:
            self._times = before

    @contextmanager
    def paused(self, *, paused: bool) -> Iterator[None]:
        """Note nothing inside the block if `paused` is true."""
        before, self._is_paused = self._is_paused, paused or self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def note_compiled_call(self) -> None:
        """Note what the host does for a call of a compiled graph besides launching its kernels."""
        if not self._is_paused and self.storages.events is not None:
            self.storages.events.append(
                Passes("compiled call", self.phase, self._place(), launches=_COMPILED_CALL, kernels=0)
            )

    def note_fused(self, results: Sequence[Tensor], *, moved: int) -> None:
        """Note a fused kernel that stores `results`, and reads and writes `moved` bytes."""
        if self._is_paused:
            return
        if self.storages.events is not None:
            dtype = next((str(one.dtype).removeprefix("torch.") for one in results if one.is_floating_point()), "")
            self.storages.events.append(Work("fused", self.phase, self._place(), 0, moved, dtype))
        for tensor in _strided(results):
            self.storages.enter(tensor, self.phase)

    @property
    def lives(self) -> list[Lives]:
        """The category and bytes of each live storage."""
        return self.storages.lives

    def begin(self, *, order: Sequence[Lives] | None = None) -> None:
        """Begin the trace here, with an allocation of each live storage.

        `order` is as for `Storages.begin`.

        Raises:
            ValueError: If the live storages differ from `order`.
        """
        self.storages.begin(order)

    def stop(self, expand: Callable[[list[Any]], list[Any]] | None = None) -> tuple[Event, ...]:
        """End the recording, and return its events; each allocation has its category.

        `expand` is as for `Storages.stop`.
        """
        return self.storages.stop(expand)

    def mark(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of the tensors' storages; a storage not seen before is allocated now."""
        with torch._C.DisableTorchFunction():  # reading a tensor's storage is no call of the step
            for tensor in _strided(tensors):
                self.storages.enter(tensor, self.phase).category = category

    def note_resized(self, storage: torch.UntypedStorage, category: Category) -> None:
        """Note that a storage was resized in place: an allocator gives it another block."""
        if not self._is_paused:
            self.storages.resized(storage, category)

    def note_collective(self, op: str, *, sent: int, overlaps: bool = True) -> None:
        """Note a collective in which each rank sends `sent` bytes.

        If it `overlaps`, the device computes at the same time.
        """
        if self.storages.events is not None and not self._is_paused:
            self.storages.events.append(Collective(op, self.phase, self._place(), sent=sent, overlaps=overlaps))

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Count the tensors' storages as 0 bytes.

        On the backend that is meant, they lie in other memory.
        """
        for tensor in _strided(tensors):
            self.storages.enter(tensor, self.phase).bytes = 0

    def backward_begins(self) -> None:
        """Begin the backward phase.

        Storages that the forward pass made and that still live are activations or logits.
        """
        self.phase = "backward"
        for storage in self.storages.live.values():
            if storage.category is None and storage.in_forward:
                storage.category = "logits" if storage.wide else "activations"

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # a dry run compiles nothing, and torch's check takes as long at each operation as all else

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch reads the device of every tensor very often
        if are_wrapped(types):
            return NotImplemented
        with torch._C.DisableTorchFunction():  # reading a tensor's shape is no call of the step
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a call and note it."""
        result = NotImplemented if self._known is None else self._known(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if self._is_paused:
            return result
        storages, phase = self.storages, self.phase
        storages.forget_sum()
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _Facts(func)
        outputs = (result,) if _is_strided(result) else tuple(_strided((result,)))
        if facts.is_view:
            for tensor in outputs:
                storages.enter(tensor, phase)  # its base may be a tensor that was not seen before
            return result
        if storages.events is not None and not facts.is_marker:
            storages.events.append(self._work(facts, args, kwargs, outputs, result))
        hidden = hidden_bytes(func, args, kwargs, result, backend=self._backend)
        first = self._follow(hidden, outputs)
        if facts.can_be_sum and phase == "backward" and first is not None:
            term = first_term(func, args)
            if term is not None:
                storages.note_sum(first, term)
        return result

    def _follow(self, hidden: Hidden, outputs: tuple[Tensor, ...]) -> Storage | None:
        """Note the allocations and frees of a call in their order.

        Return the first result's storage.
        """
        storages, phase = self.storages, self.phase
        if hidden.is_plain:
            found = [storages.enter(tensor, phase) for tensor in outputs]
            return found[0] if found else None
        entered = hidden.replay(
            outputs,
            enter=partial(storages.enter, phase=phase),
            take=storages.take,
            give=storages.give,
            keep=lambda saved: storages.tie(saved, outputs, phase),
        )
        return entered[0] if entered else None

    def _work(self, facts: _Facts, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], result: Any) -> Work:
        given = [*tensors_among((*args, *kwargs.values()) if kwargs else args)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*outputs, *given))
        dtype = next((tensor.dtype for tensor in (*outputs, *given) if tensor.is_floating_point()), None)
        flops = 0 if facts.flops is None else int(facts.flops(*args, **kwargs, out_val=result))
        factors = [tensor.dtype for tensor in given if tensor.is_floating_point()] if flops else []
        if len(factors) > 1:  # a product of half precision may be added to float32
            dtype = min(factors, key=_itemsize)
        return self._one_of_equals(facts.name, self.phase, self._place(), flops, moved, _name_of(dtype))

    def _one_of_equals(self, *key: Any) -> Work:
        """Return the operation with these attributes; equal operations are one object."""
        times = self._times
        work = self._works.get((*key, times))
        if work is None:
            work = self._works[*key, times] = Work(*key) if times == 1 else _repeated(*key, times=times)
        return work


def _repeated(op: str, phase: Phase, place: str, flops: int, moved: int, dtype: str, *, times: float) -> Passes:
    """Return many equal operations as one; the last may be smaller."""
    count = math.ceil(times)
    return Passes(op, phase, place, round(flops * times), round(moved * times), dtype, launches=count, kernels=count)


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize


@cache
def _name_of(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _is_strided(value: Any) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided


def _strided(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors with a plain storage.

    A wrapper, such as a DTensor, yields the tensors inside. A sparse tensor consists of two others, which were seen when they were made.
    """
    for tensor in tensors_among(values):
        if are_wrapped((type(tensor),)):
            yield from _strided(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # pyright: ignore[reportAttributeAccessIssue]
        elif tensor.layout == torch.strided:
            yield tensor
