"""The writes of one run of a step, and which of them its backward pass makes.

Most state is written by the step itself. Code that runs in the backward pass may write state too: a hook of a gradient, a function of autograd, the
module's own `backward`, or a forward pass that activation checkpointing repeats. A split batch takes the values of such state after each
micro-batch's backward pass, and of all other state before it: hooks that run once a batch may write that in between.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.sameness import same
from lightning_unified.step.undo import Noted
from lightning_unified.step.undo.changes import changes_since, is_same

__all__ = [
    "Write",
    "Written",
    "drawn_unequally",
    "note_backward",
    "refusal_of_backward",
    "with_backward",
    "with_states_of",
    "written_in_backward",
    "written_since",
]

_BACKWARD = " (backward)"  # the end of a key in the table
_AFTER = "as written"


@dataclass(frozen=True, slots=True)
class Write:
    """A value before a run, and the value the run wrote.

    Args:
        kind: The kind, as in `Change`.
        before: The value before; an empty list for a tail.
        after: The value after.
        limit: The largest number of entries of a deque; None for other values.
        put: Writes a value there.
        in_backward: Whether the backward pass wrote the value.
    """

    kind: str
    before: Any
    after: Any
    limit: int | None = None
    put: Callable[[Any], None] | None = None
    in_backward: bool = False


Written = dict[str, Write]


def written_since(noted: Noted) -> Written:
    """Return the values written since `noted`, by path."""
    return {one.path: Write(one.kind, one.before, _kept(one.after), one.limit, one.put) for one in changes_since(noted)}


def drawn_unequally(whole: Written, runs: Sequence[Written]) -> list[str]:
    """Return the paths of host generators whose state differs between micro-batches and whole.

    Host generators are those of Python and NumPy.
    """
    return sorted(
        path
        for path in {path for one in (whole, *runs) for path in one if _is_of_host(one[path])}
        if not all(path in run and path in whole and is_same(run[path].after, whole[path].after) for run in runs)
    )


def with_states_of(written: Written, other: Written) -> Written:
    """Return `written` with the generator states of `other`."""
    own = {path: write for path, write in written.items() if write.kind != "state"}
    return own | {path: write for path, write in other.items() if write.kind == "state"}


def _is_of_host(write: Write) -> bool:
    """Return whether the write is the state of a Python or NumPy generator; torch's are replayed."""
    state = write.after
    is_python = isinstance(state, tuple) and len(state) == 3 and state[0] == random.Random.VERSION
    return write.kind == "state" and (is_python or (isinstance(state, dict) and "bit_generator" in state))


def _kept(value: Any) -> Any:
    """Return the value to keep of a write: a tensor without its graph, anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def with_backward(written: Written, stepped: Written) -> Written:
    """Return the writes of a run, marking those of its backward pass.

    Args:
        written: The writes of the whole run.
        stepped: The writes of the step, before the backward pass.
    """
    return {path: replace(one, in_backward=_has_changed(one, stepped.get(path))) for path, one in written.items()}


def _has_changed(now: Write, before: Write | None) -> bool:
    """Return whether a value has changed since the step; generators advance wherever they draw."""
    return now.kind != "state" and (before is None or not same(now.after, before.after))


def note_backward(table: MergeTable, path: str) -> None:
    """Record that backward passes write the state at `path`."""
    table.note(f"{path}{_BACKWARD}", _AFTER)


def written_in_backward(table: MergeTable) -> set[str]:
    """Return the paths of state that backward passes write."""
    return {key.removesuffix(_BACKWARD) for key in table.paths if key.endswith(_BACKWARD)}


def refusal_of_backward(path: str) -> SplitError:
    """Return the error for state that both a hook before the last backward pass and this pass write."""
    return SplitError(
        f"on_before_zero_grad writes {path}, and so does the backward pass, which runs before that hook in all micro-batches but the last. Write it in "
        "training_step or on_train_batch_end, or declare MicroBatchRules(splittable=False)."
    )
