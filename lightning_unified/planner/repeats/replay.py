"""Skip a dry run's repeated blocks: a call returns a tensor like its twin's, and is marked."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from lightning_unified.cost_model.trace.trace import Give, Work
from lightning_unified.nn.recomputing import is_recomputed
from lightning_unified.planner.fake.known_values import value_of
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.planner.fake.storages import Storage, Storages
from lightning_unified.planner.repeats.expansion import Raw, UnlikeError, expanded, segments_of
from lightning_unified.planner.repeats.marks import Mark
from lightning_unified.planner.repeats.twins import Run, Section, Twins, blocks_of, state_of

__all__ = ["Replay"]

_PLAIN = (int, float, bool, str, torch.dtype, type(None))


@dataclass(frozen=True, slots=True)
class _Call:
    """The call of a block: the one tensor that needs a gradient, and the key of equal calls.

    Attributes:
        given: The tensor.
        kind: Equal for calls that run alike.
    """

    given: Tensor
    kind: Any


@dataclass(frozen=True, slots=True)
class _Traced:
    """The call of a block that ran, and the layout of its output."""

    kind: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    in_tuple: bool


class Replay:
    """Skips the blocks of one fake copy that have twins.

    In each micro-batch, the first three blocks of a section and its last one run. The second and the third must have equal events, which all
    blocks between then have too. The first may differ because of the operations before it, and the last because of those after it. A
    block is skipped only if it is called as the second was: with a tensor of the same layout in place of the one that needs a gradient,
    and with the same other arguments. One of these may be a cache of keys and values that the step begins empty. If some blocks of a run
    recompute, these are one section of it, and the others another one.

    Args:
        module: The fake copy.
        recorder: The recorder of its steps.
        twins: The runs of equal blocks; learnt from this copy's first step if no copy was traced before.
    """

    def __init__(self, module: nn.Module, recorder: Recorder, twins: Twins) -> None:
        self._recorder, self._storages, self._twins = recorder, recorder.storages, twins
        self._blocks = blocks_of(module)
        self._names = list(self._blocks)
        self._indices = {id(block): index for index, block in enumerate(self._blocks.values())}
        self._parameters = [dict(block.named_parameters()) for block in self._blocks.values()]
        self._sections: list[Section] | None = None  # of this step, once a block was called
        self._calls: Counter[int] = Counter()
        self._traced: dict[tuple[int, int], _Traced] = {}
        self._changed: set[int] = set()
        self._has_begun = False  # the first step on a copy decides the order in which weights begin to live
        self._last: weakref.ref[Tensor] | None = None
        self._works: dict[Any, Work] = {}
        self._skipped: dict[int, tuple[int, int]] = {}
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        if not self._names:
            twins.give_up()
        if twins.runs is None:
            self._storages.events = []  # the first step is recorded to learn from it

    @property
    def has_skipped(self) -> bool:
        """Whether a block was skipped since the last step to trace began."""
        return bool(self._skipped)

    def use(self, twins: Twins) -> None:
        """Skip by other runs from the next step on; if these are unknown, learn them from that step."""
        if twins is not self._twins:
            self._twins, self._changed = twins, set()
            if not self._names:
                twins.give_up()

    def begin(self) -> None:
        """Begin a step to trace; learn from the one before, if it was the first."""
        if self._twins.runs is None and not self._has_begun:
            weights = [_numbers_of(self._storages, block) for block in self._blocks.values()]
            self._twins.learn(self._storages.events or [], self._blocks, changed=self._changed, weights=weights)
        self._has_begun, self._sections = True, None
        self._calls.clear()
        self._traced.clear()
        self._skipped.clear()

    def outside(self) -> None:
        """Mark that no block runs from here on."""
        self._note(Mark(None))

    def expanded(self, raw: Sequence[Raw]) -> list[Any]:
        """Return the recording of a step with the events of the blocks that were skipped.

        Raises:
            UnlikeError: If twins differ.
        """
        if self._twins.runs is None:
            self._twins.learn(raw, self._blocks, changed=self._changed)
        if not self._skipped:
            return [event for event in raw if not isinstance(event, Mark)]
        segments = segments_of(raw)
        runs = {section.twins[0]: section.run for section in self._sections or () if section.skipped}
        for (direction, _, block), segment in segments.items():
            if segment.mark.skipped and not all(isinstance(event, Give) for event in segment.events):
                raise UnlikeError("operations run between two blocks")
            name = self._names[block]
            if block in runs and direction == "forward" and not is_recomputed(self._blocks[name]):
                self._twins.compare_works(runs[block].first, tuple(segment.works(name)))
        reserve = self._storages.reserve
        return expanded(raw, names=self._names, twins=self._skipped, reserve=reserve, works=self._works)

    def called(self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a module's call; a block with a twin does not run."""
        block = self._indices.get(id(module))
        if block is None or self._twins.runs == [] or not torch.is_grad_enabled():
            return call()
        if torch._C._current_autograd_node() is not None:
            return call()  # a backward pass runs it again
        part, made = self._calls[block], self._call(args, kwargs)
        self._calls[block] += 1
        section = self._section_of(block)
        may_skip = section is not None and (self._has_begun or section.run.touched is not None)
        if section is not None and may_skip and made is not None and self._is_like_its_twin(section, part, made):
            if not self._has_begun:
                _touch(self._recorder, module, section.run.touched or ())
            return self._skip(section, block, part, made.given)
        return self._run(module, block, part, made, call)

    def _section_of(self, block: int) -> Section | None:
        """Return the section in which a block is skipped."""
        if self._sections is None:
            self._sections = self._twins.sections(list(self._blocks.values()))
        return next((section for section in self._sections if block in section.skipped), None)

    def _run(self, module: nn.Module, block: int, part: int, made: _Call | None, call: Callable[[], Any]) -> Any:
        """Run a block, and mark its passes."""
        mark = self._note(Mark(("forward", part, block)))
        learns = self._twins.runs is None
        before = state_of(module) if learns else None
        result = call()
        if learns and state_of(module) != before:
            self._changed.add(block)
        output: Any = result[0] if isinstance(result, tuple) and len(result) == 1 else result
        is_plain = isinstance(output, Tensor) and output.grad_fn is not None and value_of(output) is None
        given = None if made is None else made.given
        if not is_plain or output.storage_offset() or (given is not None and output.grad_fn is given.grad_fn):
            self.outside()
            self._last = None
            return result
        mark.result = self._storage_of(output)
        if made is not None:
            self._traced[part, block] = _Traced(
                made.kind, output.shape, output.stride(), output.dtype, isinstance(result, tuple)
            )
        turn = _Turn(self, block, part)
        output.grad_fn.register_prehook(turn.begin)  # pyright: ignore[reportOptionalMemberAccess]
        if given is not None and given.grad_fn is not None:
            is_next = self._last is not None and self._last() is given
            given.grad_fn.register_prehook(partial(turn.end, is_last=not is_next))
        self._last = weakref.ref(output)
        if block + 1 == len(self._names):
            self.outside()
        return result

    def _skip(self, section: Section, block: int, part: int, given: Tensor) -> Any:
        """Return a tensor like the output of the block's twin."""
        like = self._traced[part, section.twins[0]]
        mark = self._note(Mark(("forward", part, block), skipped=True))
        self._skipped[block] = section.twins
        output: Any = _Skip.apply(given, self, section.run, block, part, like)
        mark.result = self._storages.bind(output, in_forward=True)
        self._last = weakref.ref(output)
        return (output,) if like.in_tuple else output

    def skip_backward(self, run: Run, block: int, part: int, gradient: Tensor, given: Any) -> Tensor:
        """Return the gradient of a skipped block's input, and allocate those of its parameters."""
        self._storages.forget_sum()
        mark = self._note(Mark(("backward", part, block), skipped=True))
        parameters, bind = self._parameters[block], self._storages.bind
        with torch._C.DisableTorchFunction(), self._unrecorded():  # a skipped block makes no call of the step
            for name in run.gradients:
                parameter = parameters[name]
                if parameter.grad is None:
                    shape, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
                    parameter.grad = made = torch.empty_strided(shape, stride, dtype=dtype)
                    mark.gradients[name] = bind(made)
            if run.passes:
                return gradient
            shape, stride, dtype = given
            result = torch.empty_strided(shape, stride, dtype=dtype)
            mark.result = bind(result)
            return result

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor that is not recorded."""
        with self._unrecorded():
            return torch.empty_strided(shape, stride, dtype=dtype)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        with self._recorder.paused(paused=True), torch.no_grad():
            yield

    def _is_like_its_twin(self, section: Section, part: int, made: _Call) -> bool:
        first, second = (self._traced.get((part, twin)) for twin in section.twins)
        if first is None or second is None or not first.kind == second.kind == made.kind:
            return False
        return self._last is not None and self._last() is made.given

    def _call(self, args: Any, kwargs: Any) -> _Call | None:
        """Return the call; None if it cannot be that of a twin."""
        leaves, shape = tree_flatten((args, kwargs))
        moving = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
        if len(moving) != 1 or moving[0].storage_offset():
            return None
        given = moving[0]
        kind: list[Any] = [shape, given.shape, given.stride(), given.dtype, torch.is_autocast_enabled("cpu")]
        for one in leaves:
            if one is given:
                kind.append("given")
            elif isinstance(one, Tensor):
                kind.append(id(one))
            elif isinstance(one, _PLAIN):
                kind.append(one)
            elif self._is_filled_by_blocks(one):
                kind.append(id(one))
            else:
                return None
        return _Call(given, kind)

    def _is_filled_by_blocks(self, value: Any) -> bool:
        """Return whether an argument is a cache of transformers that begins empty.

        Each block adds keys and values of its own. It was empty when the first block got it. Then no block's result depends on it, and what a skipped block would have added ends where
        its twin's ends.
        """
        cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
        if cache is None or not isinstance(value, cache):
            return False
        if value not in self._caches and int(value.get_seq_length()) == 0:
            self._caches.add(value)
        return value in self._caches

    def _note(self, mark: Mark) -> Mark:
        events: Any = self._storages.events
        if events is not None:
            events.append(mark)
        return mark

    def _storage_of(self, tensor: Tensor | None) -> Storage | None:
        return None if tensor is None else self._storages.live.get(tensor.untyped_storage()._cdata)


def _touch(recorder: Recorder, block: nn.Module, names: Sequence[str]) -> None:
    """Begin the life of a block's weights in the order of its forward pass."""
    weights = dict((*block.named_parameters(), *block.named_buffers()))
    for name in names:
        recorder.storages.enter(weights[name], recorder.phase)


def _numbers_of(storages: Storages, block: nn.Module) -> dict[int, str]:
    """Return the names of a block's weights and buffers by the numbers of their storages."""
    named = ((one.untyped_storage()._cdata, name) for name, one in (*block.named_parameters(), *block.named_buffers()))
    return {storages.live[key].number: name for key, name in named if key in storages.live}


class _Turn:
    """The backward pass of a block that ran; holds no tensor."""

    def __init__(self, replay: Replay, block: int, part: int) -> None:
        self._replay, self._block, self._part = replay, block, part
        self._mark: Mark | None = None
        self._incoming: Storage | None = None
        self._waiting: list[str] = []

    def begin(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Mark the begin of the pass."""
        replay = self._replay
        self._mark = replay._note(Mark(("backward", self._part, self._block)))
        self._incoming = replay._storage_of(gradients[0])
        self._waiting = [name for name, one in replay._parameters[self._block].items() if one.grad is None]

    def end(self, gradients: tuple[Tensor | None, ...], *, is_last: bool) -> None:
        """Note the results of the pass.

        Args:
            gradients: The gradient of the block's input.
            is_last: Whether no block's pass follows.
        """
        replay, mark = self._replay, self._mark
        if mark is None:
            return
        made = replay._storage_of(gradients[0])
        mark.result = None if made is self._incoming else made
        parameters = replay._parameters[self._block]
        found = {name: replay._storage_of(parameters[name].grad) for name in self._waiting}
        mark.gradients = {name: one for name, one in found.items() if one is not None}
        if replay._twins.runs is None:
            order = {id(one): at for at, one in enumerate(replay._storages.live.values())}
            mark.gradients = dict(sorted(mark.gradients.items(), key=lambda item: order[id(item[1])]))
        if is_last:
            replay.outside()


class _Skip(torch.autograd.Function):
    """Stands for a skipped block in autograd's graph; saves no tensor."""

    @staticmethod
    @override
    def forward(ctx: Any, given: Tensor, replay: Replay, run: Run, block: int, part: int, like: _Traced) -> Tensor:
        ctx.replay, ctx.turn = replay, (run, block, part)
        ctx.given = given.shape, given.stride(), given.dtype
        return replay.empty(like.shape, like.stride, like.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (gradient,) = grad_outputs
        result = ctx.replay.skip_backward(*ctx.turn, gradient, ctx.given)
        return result, None, None, None, None, None
