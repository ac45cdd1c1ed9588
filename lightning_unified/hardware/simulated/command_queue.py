"""A simulated Metal command queue: operations in command buffers, of which some are aborted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch is imported when something runs: the readers of hardware start without it
    import torch
    from torch import Tensor

__all__ = ["Abort", "CommandQueue"]

_MESSAGE = "Execution of the command buffer was aborted due to an error during execution. Internal Error (0000000e:Internal Error)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """A command buffer that the device aborts: its operations do not run, and nothing is raised.

    Attributes:
        after: Operations before it, counted from the call of `CommandQueue.abort`.
        operations: Operations in it. It ends earlier at `CommandQueue.wait`. A number that is read (`item()`) does not end it, because
            all tensors are the CPU's here: an optimizer's step counts are read, too, and are the host's on a Mac.
        leaves: The content of its results: the memory's earlier contents (finite numbers, drawn at random), or `"nan"`.
        says: Whether the runtime prints its message when the host waits next.
        spares_integers: Whether operations on integers lie in other command buffers, and so do the marks of the canary.
    """

    after: int
    operations: int
    leaves: Literal["stale", "nan"] = "stale"
    says: bool = True
    spares_integers: bool = False


class CommandQueue:
    """Run the operations of a simulated device in order; an `Abort` drops some of them.

    Attributes:
        lost: Operations that were lost so far.
    """

    def __init__(self) -> None:
        self._aborts: list[tuple[int, int, Abort]] = []
        self._run = 0
        self._said: str | None = None
        self._memory: torch.Generator | None = None
        self.lost = 0

    def abort(self, abort: Abort) -> None:
        """Abort a command buffer that is still to come."""
        import torch

        # its own: a fault must not move the run's random numbers
        self._memory = self._memory or torch.Generator().manual_seed(0)
        begin = self._run + abort.after
        self._aborts.append((begin, begin + abort.operations, abort))

    def execute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation, or the content that an aborted one leaves."""
        if not self._aborts:
            return func(*args, **kwargs)
        place, self._run = self._run, self._run + 1
        for begin, end, abort in self._aborts:
            if begin <= place < end and not (abort.spares_integers and _is_on_integers(args)):
                self.lost += 1
                return _lost(func, args, kwargs, self._contents(abort))
        return func(*args, **kwargs)

    def wait(self) -> None:
        """Wait for the device: commit the open command buffer; an aborted one prints its message."""
        done = [entry for entry in self._aborts if entry[0] < self._run]
        if done:
            self._aborts = [entry for entry in self._aborts if entry not in done]
            if any(abort.says for _, _, abort in done):
                self._said = _MESSAGE

    def news(self) -> str | None:
        """Return the message of a command buffer aborted since the last call; None without one."""
        said, self._said = self._said, None
        return said

    def close(self) -> None:
        """Forget all aborts that are still to come."""
        self._aborts, self._said = [], None

    def _contents(self, abort: Abort) -> "Callable[[Tensor], None]":
        import torch

        def fill(result: "Tensor") -> None:
            if not result.is_floating_point():
                result.zero_()  # an index must not lead out of bounds here
            elif abort.leaves == "nan":
                result.fill_(float("nan"))
            else:
                result.copy_(torch.randn(result.shape, generator=self._memory))

        return fill


def _lost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fill: "Callable[[Tensor], None]") -> Any:
    """Run an operation for its result shapes and effects on the host, and undo its writes."""
    schema = func._schema
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
    written = [
        tensor
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _dense((value,))
    ]
    before = [tensor.clone() for tensor in written]
    result = func(*args, **kwargs)
    for tensor, contents in zip(written, before, strict=True):
        if tensor.shape == contents.shape:  # otherwise resized, which the host does
            tensor.copy_(contents)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for returned, one in zip(schema.returns, results, strict=False):
        if returned.alias_info is None:
            for tensor in _dense((one,)):
                fill(tensor)
    return result


def _is_on_integers(args: Iterable[Any]) -> bool:
    tensors = _dense(args)
    return bool(tensors) and not any(tensor.is_floating_point() for tensor in tensors)


def _dense(values: Iterable[Any]) -> "list[Tensor]":
    import torch

    found: list[Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _dense(value)
    return found
