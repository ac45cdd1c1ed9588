"""Forward and backward passes of a network recorded as CUDA graphs, one pair for each shape: a step of a small model waits for its host.

A replay tells the device in one call what Python tells it in hundreds. benchmarks/classifier_rivals.py shows what that is worth.
"""

import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientRoom
from lightning_unified.nn.cuda_graphs.recordable import Looking, reads_outside, saves_elsewhere, state_of, why_not
from lightning_unified.nn.cuda_graphs.recording import Call, Recording, Turn, call_of, record, recording_stream

__all__ = ["RecordedCalls", "eager_calls", "is_recorded", "may_be_recorded", "release_recordings"]

log = logging.getLogger("lightning_unified")

_paused: ContextVar[bool] = ContextVar("paused", default=False)
_SHORT = "memory has run out twice while it was recorded; a smaller memory.micro_batch_size leaves room"
_SETTLED = 8  # judgement: calls in a row that bring no new shape before all shapes are recorded
_STALE = 256  # judgement: calls after which a shape that has not come makes place for another
_CHANGES = 64  # judgement: so often may the network change before it is left alone for good


class RecordedCalls:
    """Stands in for the calls of `network` in training from construction until `remove`, and replays those whose shape it has recorded.

    Outputs and gradients are those of the eager calls: the same kernels on the same memory of weights, random numbers drawn anew at
    each replay, gradients handed to autograd, which accumulates them and calls the parameters' hooks. Calls run eagerly

    - without gradients, in eval mode, under torch's dispatch and function modes (a plan's fakes), in a recording of somebody else's;
    - with arguments that are no plain tensors on the network's device and no plain constants;
    - of a shape that is new. The first one is looked at for whatever cannot be recorded, which is said once in the log. Recording
      begins when a few calls in a row have brought nothing new, and then all that came again are recorded, the largest first. A new
      shape after that gives all recordings back before it runs and begins that anew: its memory is not to come on top of theirs;
    - of more shapes than `most` that come now and then, and after a recorded call that still waits for its backward pass;
    - inside `eager_calls`.

    All recordings share one pool of memory, and one room for the gradients of the trained parameters, which is where these are between a
    replay and `zero_grad`. The first time that memory runs out in a recording that is raised, so that who can makes the batch smaller; the
    second time there will be no more of them, for a run is not to end for them. Copies of the network, by
    `copy.deepcopy`, `pickle` or `torch.save`, are eager ones, as after `Module.compile`, whose place in the module this takes.

    What Python does in the forward pass (counting, printing, looking at the clock) happens at the recording and not at replays.

    Args:
        network: Its trained parameters lie on one device.
        most: Shapes that are recorded.

    Attributes:
        gradients: The room for gradients: as many bytes as the trained parameters have. A list that stays the same one.

    Raises:
        ValueError: If the network has no trained parameter, or its calls are stood in for already.
    """

    def __init__(self, network: nn.Module, *, most: int = 16) -> None:
        trained = [one for one in network.parameters() if one.requires_grad]
        name = type(network).__name__
        if not trained:
            raise ValueError(f"{name} has no parameter that is trained: there is no backward pass to record.")
        if network._compiled_call_impl is not None:
            raise ValueError(
                f"calls of {name} are stood in for already (Module.compile does it too): remove that first."
            )
        self._network, self._most, self._device = network, most, trained[0].device
        self.gradients: list[Tensor] = []
        self._room = GradientRoom({})
        self._state: tuple[Any, ...] | None = None
        self._known: dict[Hashable, Call] = {}
        self._again: set[Hashable] = set()  # of these, the ones that came more than once
        self._last: dict[Hashable, int] = {}  # the number of the call in which each came last
        self._calls = 0
        self._pool: Any = None
        self._recordings: dict[Hashable, Recording] = {}
        self._written: dict[int, Tensor] = {}
        self._turn: weakref.ref[Turn] | None = None
        self._refused = False
        self._changes = -1  # the first state is none
        self._quiet = self._failures = self._shortages = 0
        self._said: set[str] = set()
        self._begin(state_of(network))
        if self._device.type == "cuda":
            recording_stream(self._device)  # takes its memory before anybody plans with what is left
        network._compiled_call_impl = self  # pyright: ignore[reportAttributeAccessIssue]  # what __call__ calls; torch drops it from copies

    @property
    def is_refused(self) -> bool:
        """Whether something is known by now that no call can be recorded for."""
        return self._refused

    @property
    def recorded(self) -> int:
        """How many shapes are recorded now."""
        return len(self._recordings)

    def gather(self) -> None:
        """Move the gradients that there are into the room, out of what activations have left."""
        self._room.adopt()

    def release(self) -> None:
        """Give all recordings back; they are made anew when their shapes come again."""
        self._recordings.clear()
        self._quiet, self._pool = 0, None

    def remove(self) -> None:
        """Leave the network as it was; twice does no harm."""
        if vars(self._network).get("_compiled_call_impl") is self:
            self._network._compiled_call_impl = None
        self.release()
        self._forget()
        self._written.clear()
        self._leave_room()
        self._state = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = self._network._call_impl
        call = self._plain(args, kwargs)
        if call is None:
            return eager(*args, **kwargs)
        state = state_of(self._network)
        if state != self._state:
            self._begin(state)
        if self._refused or self._waits:
            return eager(*args, **kwargs)
        self._calls += 1
        if call.key not in self._known:
            return self._first(call, args, kwargs)
        self._last[call.key] = self._calls
        if call.key not in self._recordings:
            self._quiet += 1
            self._again.add(call.key)
            if self._quiet < _SETTLED or not self._record():
                return eager(*args, **kwargs)
        turn = Turn()
        self._turn = weakref.ref(turn)
        return self._recordings[call.key].replay(call.tensors, turn=turn)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return the call if it may be replayed, as far as what is around it decides that."""
        watched = (
            not (self._network.training and torch.is_grad_enabled())
            or self._changes > _CHANGES
            or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._len_torch_function_stack() > 0
            or torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
            or saves_elsewhere()
            or torch.is_anomaly_enabled()  # looks at values in the backward pass
            or _has_any_global_hook()
            or torch.cuda.is_current_stream_capturing()
            or _paused.get()
        )
        return None if watched else call_of(args, kwargs, device=self._device)

    @property
    def _waits(self) -> bool:
        """Whether a replayed forward pass is still to have its backward pass, whose memory another replay would take."""
        turn = None if self._turn is None else self._turn()
        return turn is not None and not turn.over

    def _begin(self, state: tuple[Any, ...]) -> None:
        """Forget everything: the network is another one than it was."""
        self.release()
        self._forget()
        self._written.clear()
        self._state, self._changes = state, self._changes + 1
        trained: dict[str, Tensor] = {name: one for name, one in self._network.named_parameters() if one.requires_grad}
        if self._shortages < 2:
            if _kinds(trained) != _kinds(self._room.places):
                self._room = GradientRoom(trained)
                self.gradients[:] = self._room.blocks
            self._room.parameters = trained
        self._device = next(iter(trained.values())).device if trained else self._device
        self._refused = False
        reason = why_not(self._network) if trained else "none of its parameters is trained"
        if self._shortages > 1:
            reason = _SHORT
        if self._changes > _CHANGES:
            reason = "its weights, hooks or modes change all the time"
        if reason is not None:
            self._refuse(reason)

    def _first(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first call of a shape, which warms up the kernels, and look at what it does."""
        if len(self._known) >= self._most:
            self._forget_stale()
        if len(self._known) >= self._most:
            self._say(f"is called with more than {self._most} shapes: the others run eagerly")
            return self._network._call_impl(*args, **kwargs)
        failures = _failures(self._device)
        if failures != self._failures:
            # memory ran out since: what was called before that may be too large to be called again
            self._failures = failures
            self._forget()
        self.release()
        watched = {id(one): (one, one._version) for one in (*call.tensors, *self._network.buffers())}
        with Looking(self._device) as looking:
            result = self._network._call_impl(*args, **kwargs)
        written = {key: one for key, (one, version) in watched.items() if one._version != version}
        reason = looking.reason or self._against(result, call, written)
        if reason is None:
            self._known[call.key], self._last[call.key] = call.example(), self._calls
            self._written |= written
        else:
            self._refuse(reason)
        return result

    def _against(self, result: Any, call: Call, written: dict[int, Tensor]) -> str | None:
        leaves = tree_leaves(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(type(leaf) not in (Tensor, type(None)) for leaf in leaves):
            return "it returns something that is neither tensor nor None"
        if not any(one.requires_grad for one in outputs):
            return "nothing that it returns is differentiated"
        if any(id(one) in written for one in call.tensors):
            return "it writes into its arguments"
        if state_of(self._network) != self._state:
            return "it replaces tensors of its own when it is called"
        return reads_outside(outputs, inputs=call.tensors, parameters=[*self._network.parameters()])

    def _record(self) -> bool:
        """Record the shapes that have come again and are not recorded, the largest first: its memory serves the smaller ones.

        Returns:
            Whether that was possible; if not, it never will be.

        Raises:
            torch.OutOfMemoryError: If memory runs out for the first time; nothing is left of any recording then, and no shape known.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        due = [call for key, call in self._known.items() if key in self._again and key not in self._recordings]
        self._room.adopt()
        try:
            for call in sorted(due, key=lambda one: one.elements, reverse=True):
                self._recordings[call.key] = record(
                    self._network, call, room=self._room, written=[*self._written.values()], pool=self._pool
                )
        except BaseException as error:
            self.release()
            self._forget()
            self._shortages += isinstance(error, torch.OutOfMemoryError)
            if self._shortages < 2 or not isinstance(error, torch.OutOfMemoryError):
                raise
        else:
            return True
        self._refuse(_SHORT)
        self._leave_room()
        return False

    def _leave_room(self) -> None:
        """Give the room for gradients back, but for what are gradients now."""
        self._room = GradientRoom({})
        self.gradients.clear()

    def _forget(self) -> None:
        self._known.clear()
        self._again.clear()
        self._last.clear()

    def _forget_stale(self) -> None:
        """Forget shapes that come no more, as after batches are cut otherwise."""
        for key in [key for key in self._known if self._calls - self._last[key] > _STALE]:
            for shapes in (self._known, self._last, self._recordings):
                shapes.pop(key, None)
            self._again.discard(key)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._forget()
        self._say(f"is not recorded, and runs eagerly as it is now: {reason}")

    def _say(self, what: str) -> None:
        text = f"{type(self._network).__name__} {what}."
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)


def is_recorded(network: nn.Module) -> bool:
    """Return whether calls of `network`, or of a module in it, are replayed by now."""
    return any(one.recorded for one in _stand_ins(network))


def may_be_recorded(network: nn.Module) -> bool:
    """Return whether calls of `network`, or of a module in it, are replayed or may come to be: what is reserved then tells nothing of waste."""
    return any(not one.is_refused for one in _stand_ins(network))


def release_recordings(network: nn.Module) -> None:
    """Give the recordings of `network` and of all modules in it back, as where memory is short."""
    for one in _stand_ins(network):
        one.release()


@contextmanager
def eager_calls() -> Iterator[None]:
    """Let all networks run eagerly inside, as if nothing stood in for their calls, which nobody learns of."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def _stand_ins(network: nn.Module) -> Iterator[RecordedCalls]:
    for module in network.modules():
        own = vars(module).get("_compiled_call_impl")
        if isinstance(own, RecordedCalls):
            yield own


def _kinds(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(name, one.shape, one.dtype, one.device) for name, one in tensors.items()]


def _failures(device: torch.device) -> int:
    """Return how often memory has run out on the device; what only counts elsewhere is 0."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0) if device.type == "cuda" else 0
