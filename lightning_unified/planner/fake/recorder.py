"""Turns the operations that torch dispatches into the events of a `Trace`: what each computed, took and gave back."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_unified.cost_model.backends import Hidden, hidden_bytes
from lightning_unified.cost_model.backends.kernel_memory.calls import BACK, RESULT
from lightning_unified.cost_model.trace.trace import Category, Event, Give, Phase, Take, Work
from lightning_unified.planner.fake.flops import own_flops
from lightning_unified.planner.fake.known_values import tensors_among

__all__ = ["Lives", "Recorder", "alike"]

_OF_A_STEP = ("activations", "logits", "temporaries")  # what a step makes

Lives = tuple[Category | None, int]

aten = torch.ops.aten
_IN_PLACE = (aten.add.Tensor, aten.index_put.default)  # when the backward engine itself runs them on real tensors
_DROPOUT = aten.native_dropout.default  # its mask is made first
_DEVICE = torch.ops.prim.device.default
_ENGINE = (
    "_engine_run_backward"  # torch/autograd/graph.py: the one frame below operations of built-in backward formulas
)
_WRAPPERS = ("_python_dispatch.py", "eval_frame.py", "recorder.py")


class _Storage:
    """A storage that lives: its number in the trace, and what is known of it so far."""

    __slots__ = ("bytes", "category", "in_forward", "number", "wide")

    def __init__(self, number: int, count: int) -> None:
        self.number, self.bytes = number, count
        self.category: Category | None = None
        self.in_forward = self.wide = False


class _Facts:
    """What is always true of one operation."""

    __slots__ = ("flops", "is_marker", "is_view", "name")

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        self.is_marker = self.name.startswith(("profiler.", "prim."))
        self.is_view: bool = bool(getattr(func, "is_view", False))
        own = own_flops(func)
        registered = flop_registry.get(getattr(func, "_overloadpacket", None))
        self.flops: Callable[..., int] | None = registered if own is None else own


class Recorder(TorchDispatchMode):
    """Follows storages by weak references, real or fake ones, and notes what happens to them between `begin` and `events`.

    A storage's category is known at the end only: weights, gradients, optimizer state, buffers and the batch are marked by whoever
    knows them; what a forward pass made and its backward pass finds is an activation, or logits if one of its dimensions is a
    vocabulary; the rest is temporary.

    Autograd adds gradients that meet in place, unless the first is a view (as one from the product of a tied table is), and never
    under a mode like this one (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp); neither does it then write gradients
    of indexed entries in place (`index_backward` in torch/csrc/autograd/FunctionsManual.cpp). Both are noted as they run without it.

    Args:
        backend: Whose kernels the step is for.
        place: Tells the module that runs.
        widths: Dimensions that are vocabularies.

    Attributes:
        phase: Of the operations that come.
    """

    def __init__(
        self,
        *,
        backend: str,
        place: Callable[[], str] = str,
        widths: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.phase: Phase = "setup"
        self._backend, self._place = backend, place
        self._widths = frozenset(widths)
        self._live: dict[int, _Storage] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._tied: dict[int, list[_Storage]] = {}
        self._raw: list[Work | _Storage | Give] | None = None
        self._facts: dict[Any, _Facts] = {}
        self._count = 0
        self._sum: tuple[_Storage, int, int] | None = None

    @property
    def lives(self) -> list[Lives]:
        """What lives now: of what category, and how many bytes."""
        return [(storage.category, storage.bytes) for storage in self._live.values()]

    def begin(self, *, order: Sequence[Lives] | None = None) -> None:
        """Begin the trace here: what lives now is taken first.

        Args:
            order: What lived at the beginning of another trace, by whose order and categories this one is to begin; None for the
                order in which it began to live.

        Raises:
            ValueError: If something else lives than `order` says.
        """
        living = list(self._live.values())
        if order is not None:
            if not alike(self.lives, order):
                raise ValueError("something else lives now than what lived before")
            waiting: dict[Any, deque[_Storage]] = {}
            for storage in living:
                waiting.setdefault(_kind((storage.category, storage.bytes)), deque()).append(storage)
            living = [waiting[_kind(one)].popleft() for one in order]
            for storage, (category, _) in zip(living, order, strict=True):
                storage.category = category
        self._raw = [Work(op="", phase="setup"), *living]
        self._sum = None

    def stop(self) -> tuple[Event, ...]:
        """Return the events since `begin`, each storage with its category, and note no more."""
        raw, self._raw = self._raw or [], None
        return tuple(
            Take(one.number, one.bytes, one.category or "temporaries") if isinstance(one, _Storage) else one
            for one in raw
        )

    def mark(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what the storages of `tensors` are for; those not seen yet live from now on."""
        for tensor in _strided(tensors):
            self._enter(tensor).category = category

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` as nothing: they are elsewhere on the machine that is meant."""
        for tensor in _strided(tensors):
            self._enter(tensor).bytes = 0

    def backward_begins(self) -> None:
        """What the forward pass made and is still there was kept for this."""
        self.phase = "backward"
        for storage in self._live.values():
            if storage.category is None and storage.in_forward:
                storage.category = "logits" if storage.wide else "activations"

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a dry run, and the check at each operation takes as long as the rest

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked of every tensor again and again
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._sum = None
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _Facts(func)
        outputs = tuple(_strided((result,)))
        if facts.is_view:
            for tensor in outputs:
                self._enter(tensor)  # of a tensor that was not seen before
            return result
        if self._raw is not None and not facts.is_marker:
            self._raw.append(self._work(facts, args, kwargs, outputs, result))
        hidden = hidden_bytes(func, args, kwargs, result, backend=self._backend)
        first = self._follow(hidden, outputs[::-1] if func is _DROPOUT else outputs)
        if func in _IN_PLACE and self.phase == "backward" and first is not None:
            self._note_sum(first, args)
        return result

    def _follow(self, hidden: Hidden, outputs: tuple[Tensor, ...]) -> _Storage | None:
        """Take and give what a call does, results and hidden blocks in their order, and return the storage of the first result."""
        waiting = list(reversed(outputs))
        entered = [self._enter(waiting.pop()) for _ in range(len(waiting) - hidden.order.count(RESULT))]
        inside: list[_Storage] = []
        for step in hidden.order:
            if step == BACK:
                self._give(inside.pop())
            elif step != RESULT:
                inside.append(self._take(step))
            elif waiting:
                entered.append(self._enter(waiting.pop()))
        if hidden.saved and outputs:
            self._tie(hidden.saved, outputs)
        for block in inside:
            self._give(block)
        return entered[0] if entered else None

    def _work(self, facts: _Facts, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], result: Any) -> Work:
        moved, dtype = 0, ""
        for tensor in outputs:
            moved += tensor.numel() * tensor.element_size()
            if not dtype and tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors_among((*args, *kwargs.values())):
            moved += tensor.numel() * tensor.element_size()
            if not dtype and tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
        flops = 0 if facts.flops is None else int(facts.flops(*args, **kwargs, out_val=result))
        return Work(facts.name, self.phase, self._place(), flops, moved, dtype)

    def _enter(self, tensor: Tensor) -> _Storage:
        """Return what is known of the tensor's storage; one not seen before begins to live here."""
        untyped = tensor.untyped_storage()
        key, count = untyped._cdata, untyped.nbytes()
        storage = self._live.get(key)
        if storage is not None:
            if storage.bytes not in (count, 0):
                self._resize(key, storage, count)
            return self._live[key]
        storage = self._take(count)
        if self.phase == "forward":
            storage.in_forward = True
            storage.wide = bool(self._widths) and not self._widths.isdisjoint(tensor.shape[1:])
        elif self.phase == "batch":
            storage.category = "batch"
        self._live[key] = storage
        self._references[key] = weakref.ref(untyped, partial(self._gone, key))
        return storage

    def _take(self, count: int) -> _Storage:
        self._count += 1
        storage = _Storage(self._count, count)
        if self._raw is not None:
            self._raw.append(storage)
        return storage

    def _give(self, storage: _Storage) -> None:
        if self._raw is not None:
            self._raw.append(Give(storage.number))

    def _resize(self, key: int, storage: _Storage, count: int) -> None:
        """A storage that grew in place (`resize_`) is another one for an allocator."""
        grown = self._take(count)
        grown.category, grown.in_forward, grown.wide = storage.category, storage.in_forward, storage.wide
        self._give(storage)
        self._live[key] = grown

    def _tie(self, count: int, outputs: tuple[Tensor, ...]) -> None:
        """Take what a kernel keeps beside its results, for as long as the result lives that stands for it."""
        keys = [tensor.untyped_storage()._cdata for tensor in outputs]
        owner = next((key for key in keys if self._live[key].bytes == 0), keys[0])
        storage = self._take(count)
        storage.in_forward = self.phase == "forward"
        self._tied.setdefault(owner, []).append(storage)

    def _gone(self, key: int, _reference: object) -> None:
        storage = self._live.pop(key, None)
        self._references.pop(key, None)
        if storage is None:
            return
        if self._sum is not None and self._sum[1] == key:
            self._add_in_place(storage)
            return
        self._give(storage)
        for tied in self._tied.pop(key, ()):
            if tied.category is None and storage.category is not None:
                tied.category = storage.category
            self._give(tied)

    def _note_sum(self, result: _Storage, args: Any) -> None:
        """Note a sum of gradients that the engine itself forms: if its first term ends with it, it was added in place."""
        term = args[0]
        if not isinstance(term, Tensor) or term._is_view():
            return  # what a view is of holds its memory too, and the engine adds in place what is held once
        key = term.untyped_storage()._cdata
        known = self._live.get(key)
        if known is None or known is result or known.bytes != result.bytes:
            return
        if self._raw is not None and not torch.is_grad_enabled() and _called_by_engine():
            taken = next(at for at in range(len(self._raw) - 1, -1, -1) if self._raw[at] is result)
            self._sum = (result, key, taken)

    def _add_in_place(self, term: _Storage) -> None:
        """Let the sum be the storage of its first term, which has ended in that moment."""
        assert self._sum is not None
        assert self._raw is not None
        result, _, index = self._sum
        self._sum = None
        del self._raw[index]
        key = next(key for key, storage in self._live.items() if storage is result)
        self._live[key] = term


def alike(some: Iterable[Lives], others: Iterable[Lives]) -> bool:
    """Return whether the same lives: in each category as many storages of the same sizes in the same order.

    What a step left over has no category that lasts and no order that matters: of it there must be as many of each size.
    """
    first, second = (_sizes_by_kind(lives) for lives in (some, others))
    return first == second


def _sizes_by_kind(lives: Iterable[Lives]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for one in lives:
        found.setdefault(_kind(one), []).append(one[1])
    return found


def _kind(one: Lives) -> Any:
    category, count = one
    return count if category is None or category in _OF_A_STEP else category


def _strided(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that have a storage: a sparse one consists of two others, which were seen when they were made."""
    return (tensor for tensor in tensors_among(values) if tensor.layout == torch.strided)


def _called_by_engine() -> bool:
    """Return whether no Python but torch's own is between the backward engine and this operation."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == _ENGINE
