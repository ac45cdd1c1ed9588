"""Record a network's forward and backward passes as CUDA graphs, a pair per input shape.

A step of a small model waits for its host: Python launches hundreds of kernels one by one. A replay launches them with one
call. benchmarks/models/classifier/rivals.py measures the gain.
"""

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.nn.compiled import COMPILED_CALL, compiled_inside
from lightning_unified.nn.cuda_graphs.calls import Call, call_of
from lightning_unified.nn.cuda_graphs.contexts import are_eager, eager_calls, may_record
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, reduces
from lightning_unified.nn.cuda_graphs.passes import UnrecordableError, free_workspaces, recording_stream, rehearse
from lightning_unified.nn.cuda_graphs.recordable import look, must_run_eagerly, state_of, why_not
from lightning_unified.nn.cuda_graphs.recording import Recording, Turn, record
from lightning_unified.nn.cuda_graphs.shapes import KnownShapes
from lightning_unified.nn.stand_in import warn_once

__all__ = [
    "RecordedCalls",
    "gather_gradients",
    "is_recorded",
    "may_be_recorded",
    "release_recordings",
    "replayed_parts",
]

_SHORT = "memory has run out twice while it was recorded; a smaller memory.micro_batch_size leaves room"
_CHANGES = 64  # judgement: changes of the network after which its calls stay eager
_IN_USE: "weakref.WeakSet[RecordedCalls]" = weakref.WeakSet()


class RecordedCalls:
    """Replay the training calls of `network` as CUDA graphs, until `remove`.

    Outputs and gradients equal those of eager calls: the same kernels read the same weights, and each replay draws new random
    numbers. Autograd receives the gradients, accumulates them and calls the parameters' hooks. A call runs eagerly

    - without gradients, in eval mode, under torch's dispatch and function modes (as in a dry run), or inside another recording;
    - with arguments other than plain tensors on the network's device and plain constants;
    - with a new shape. The first such call is checked for operations that cannot be recorded; the log names them once. Operations
      of compiled parts are checked before the recording, in two more runs with nothing kept. If there are few
      shapes, and only their numbers of rows differ, all of them are recorded at the next call of one. Otherwise recording begins after a
      few calls without a new shape, and covers the shapes that came more than once. The largest is recorded first. A later new shape
      frees all recordings before it runs, so that its memory does not add to theirs, and recording begins again;
    - inside `no_new_recordings`, with a shape that is not recorded and gradients outside of the buffer;
    - with more than `most` shapes in turn, or while an earlier replay still waits for its backward pass;
    - inside `eager_calls`.

    Blocks under `Recomputing` are recorded with their second run. A network with such blocks that draws random numbers stays eager.

    All recordings share one memory pool and one gradient buffer, which holds the gradients between a replay and `zero_grad`. The
    buffer exists as long as recordings do, so that gradients are in memory once. If memory runs out in a recording, the first error
    is raised, so that callers may reduce the micro-batch size. After the second, calls stay eager, and the run continues. Copies of
    the network (`copy.deepcopy`, `pickle`, `torch.save`) run eagerly, as they do after `Module.compile`: this class uses the same
    attribute of the module.

    A recording holds the numbers and texts that the forward pass read from attributes of the network's modules. If one of them changes, all
    recordings are made anew. A network that changes them itself, or draws random numbers in Python, runs eagerly. Other Python code of the
    forward pass (prints, clocks, values in containers and globals) runs at the recording and not at replays.

    Args:
        network: The network; its trained parameters lie on one device.
        most: Number of shapes to record at most.

    Attributes:
        is_refused: Whether a reason is known why no call can be recorded.
        has_new_shape: Whether `gather_first` has not run since the first call of a shape.
        only_records: Tells `is_compiled` that the network is not compiled.

    Raises:
        ValueError: If the network has no trained parameter, or its calls are replaced already.
    """

    only_records = True

    def __init__(self, network: nn.Module, *, most: int = 16) -> None:
        trained = [one for one in network.parameters() if one.requires_grad]
        name = type(network).__name__
        if not trained:
            raise ValueError(f"{name} has no trained parameter: there is no backward pass to record.")
        if network._compiled_call_impl is not None:
            raise ValueError(f"calls of {name} are replaced already (Module.compile does it too): remove that first.")
        self._network, self._device = network, trained[0].device
        self._trained: dict[str, Tensor] = {}
        self._buffer = GradientBuffer({})
        self._state: tuple[Any, ...] | None = None
        self._shapes = KnownShapes(most=most)
        self._pool: Any = None
        self._recordings: dict[Hashable, Recording] = {}
        self._written: dict[int, Tensor] = {}
        self._turn: weakref.ref[Turn] | None = None
        self.is_refused = False
        self._changes = -1  # the first state is none
        self.has_new_shape = False
        self._failures = self._shortages = 0
        self._said: set[str] = set()
        self._begin(state_of(network))
        if self._device.type == "cuda":
            recording_stream(self._device)  # takes its memory before a plan counts the free bytes
        _IN_USE.add(self)
        network._compiled_call_impl = self  # pyright: ignore[reportAttributeAccessIssue]  # __call__ calls it; torch drops it from copies

    @property
    def recorded(self) -> int:
        """The number of recorded shapes."""
        return len(self._recordings)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient buffer's blocks; none without recordings."""
        return self._buffer.blocks

    def gather(self) -> None:
        """Move existing gradients into the gradient buffer, out of memory that activations left."""
        if not self.is_refused:
            self._buffer = self._buffer.gather(self._trained)

    def gather_first(self) -> None:
        """Gather the gradients of a new shape's first call, so that the second can be recorded.

        Gradients that processes reduce stay where they are.
        """
        if self.has_new_shape and not reduces():
            self.gather()
        self.has_new_shape = False

    def release(self) -> None:
        """Free all recordings; they are made again at the next calls of their shapes."""
        self._recordings.clear()
        self._shapes.unsettle()
        self._pool = None

    def remove(self) -> None:
        """Restore the network; a second call does nothing."""
        if vars(self._network).get(COMPILED_CALL) is self:
            self._network._compiled_call_impl = None
        self._drop()
        self._buffer = GradientBuffer({})
        self._state = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = self._network._call_impl
        call = self._plain(args, kwargs)
        if call is None:
            return eager(*args, **kwargs)
        state = state_of(self._network)
        if state != self._state:
            self._begin(state)
        if self.is_refused or self._waits:
            return eager(*args, **kwargs)
        if not self._shapes.count_call(call.key):
            return self._first(call, args, kwargs)
        if call.key not in self._recordings:
            is_due = self._shapes.count_known_call(call.key) and (may_record() or self._buffer.is_held)
            if not (is_due and self._record()):
                self._free_unused_buffer()
                return eager(*args, **kwargs)
        self._buffer.take_in()
        turn = Turn()
        self._turn = weakref.ref(turn)
        return self._recordings[call.key].replay(call.tensors, turn=turn)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return the call, or None if modes, hooks or contexts around it forbid a replay."""
        if are_eager() or self._changes > _CHANGES or must_run_eagerly(self._network):
            return None
        return call_of(args, kwargs, device=self._device)

    @property
    def _waits(self) -> bool:
        """Whether a replayed forward pass waits for its backward pass.

        Another replay would overwrite the memory that the backward pass reads.
        """
        turn = None if self._turn is None else self._turn()
        return turn is not None and not turn.over

    def _begin(self, state: tuple[Any, ...]) -> None:
        """Start anew for a network that has changed."""
        self._drop()
        self._state, self._changes = state, self._changes + 1
        self._trained = {name: one for name, one in self._network.named_parameters() if one.requires_grad}
        self._device = next(iter(self._trained.values())).device if self._trained else self._device
        self.is_refused = False
        reason = why_not(self._network)
        if self._shortages > 1:
            reason = _SHORT
        if self._changes > _CHANGES:
            reason = "its weights, attributes, hooks or modes change all the time"
        if reason is not None:
            self._refuse(reason)

    def _first(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first call of a shape, which warms up the kernels, and check it for a recording."""
        for key in self._shapes.drop_stale():
            self._recordings.pop(key, None)
        if self._shapes.is_full:
            self._say(f"is called with more than {self._shapes.most} shapes: the others run eagerly")
            return self._network._call_impl(*args, **kwargs)
        if (failures := _failures(self._device)) != self._failures:
            self._failures = failures  # memory ran out since: earlier shapes may be too large to come again
            self._shapes.forget()
        self.release()
        self._free_unused_buffer()
        found = look(self._network, call, args, kwargs, state=self._state)
        if found.reason is None:
            self._shapes.add(call.example())
            self._written |= found.written
            self.has_new_shape = True
        else:
            self._refuse(found.reason)
        return found.result

    def _record(self) -> bool:
        """Record the shapes with more than one call; return whether that succeeded.

        After False, nothing is recorded any more.

        Raises:
            torch.OutOfMemoryError: If memory runs out for the first time; all recordings and known shapes are dropped then.
        """
        has_compiled_parts = bool(compiled_inside(self._network))
        if has_compiled_parts:
            self.release()  # rehearsals need the memory
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            self._buffer = self._buffer.gather(self._trained)
            free_workspaces(self._device)
            due, written = self._shapes.due(self._recordings), [*self._written.values()]
            with eager_calls():
                for call in due if has_compiled_parts else ():
                    rehearse(self._network, call, buffer=self._buffer, written=written)
                for call in due:
                    self._recordings[call.key] = record(
                        self._network, call, buffer=self._buffer, written=written, pool=self._pool
                    )
        except UnrecordableError:
            self._drop()
            self._refuse("a compiled part waits for the device")
            return False
        except BaseException as error:
            self._drop()
            self._shortages += isinstance(error, torch.OutOfMemoryError)
            if self._shortages < 2 or not isinstance(error, torch.OutOfMemoryError):
                raise
        else:
            return True
        self._refuse(_SHORT)
        return False

    def _drop(self) -> None:
        """Free all recordings, and forget all shapes."""
        self.release()
        self._shapes.forget()
        self._written.clear()

    def _free_unused_buffer(self) -> None:
        """Free the gradient buffer if neither recordings nor gradients use it.

        Eager calls bring gradients of their own.
        """
        if not self._recordings and not self._buffer.is_held:
            self._buffer = GradientBuffer({})

    def _refuse(self, reason: str) -> None:
        self.is_refused = True
        self._shapes.forget()
        self._buffer = GradientBuffer({})  # gradients in it live on
        self._say(f"is not recorded, and runs eagerly as it is now: {reason}")

    def _say(self, what: str) -> None:
        warn_once(self._said, f"{type(self._network).__name__} {what}.")


def is_recorded(network: nn.Module) -> bool:
    """Return whether a recording exists for `network` or a module in it."""
    return any(one.recorded for _, one in _stand_ins(network))


def may_be_recorded(network: nn.Module) -> bool:
    """Return whether calls of `network` or a module in it may be recorded.

    Reserved memory does not show waste then.
    """
    return bool(replayed_parts(network))


def replayed_parts(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules in `network` whose calls may be recorded."""
    return tuple(name for name, one in _stand_ins(network) if not one.is_refused)


def release_recordings(network: nn.Module) -> None:
    """Free the recordings of `network` and all modules in it.

    Call it where memory is short.
    """
    for _, one in _stand_ins(network):
        one.release()


def gather_gradients(network: nn.Module) -> None:
    """Gather the gradients of first calls of new shapes, after a backward pass.

    The next call of `network`, or of a module in it, can be recorded then, even where gradients are set aside during the call.

    Raises:
        torch.OutOfMemoryError: If there is no memory for a gradient buffer; gradients are as before.
    """
    if any(one.has_new_shape for one in _IN_USE):  # else without a walk over all modules
        for _, one in _stand_ins(network):
            one.gather_first()


def _stand_ins(network: nn.Module) -> Iterator[tuple[str, RecordedCalls]]:
    """Yield the recorded calls in `network`, with the names of their modules."""
    if not _IN_USE:  # this runs at every step, and networks have hundreds of modules
        return
    for name, module in network.named_modules():
        own = vars(module).get(COMPILED_CALL)
        if isinstance(own, RecordedCalls):
            yield name, own


def _failures(device: torch.device) -> int:
    """Return how often memory has run out on a CUDA device; 0 for other devices."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0) if device.type == "cuda" else 0
