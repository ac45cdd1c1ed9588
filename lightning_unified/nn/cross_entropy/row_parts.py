"""The rows of a loss, part by part.

All whole parts but the first run the same operations. So a dry run, which counts operations and computes nothing, runs one of them in place
of all (`repeated_once`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["parts", "repeated_once"]

_Times = Callable[[float], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Repetition:
    times: _Times
    whole_chunks: bool


_open: list[_Repetition] = []  # not a context variable: on a GPU, backward passes run in autograd's threads


def parts(divided: Tensor, rows: int) -> Iterator[slice]:
    """Yield the rows of each part.

    Args:
        divided: A tensor that is divided along its first dimension. Only parts of fake tensors stand for others.
        rows: Rows of a part.
    """
    count = len(divided)
    repetition = _open[-1] if _open and isinstance(divided, FakeTensor) else None
    if repetition is None or count <= rows:
        yield from (slice(start, start + rows) for start in range(0, count, rows))
    elif repetition.whole_chunks:
        yield slice(0, rows)
        with repetition.times((count - rows) / rows):
            yield slice(0, rows)  # not `rows` to `2 * rows`, which the data may not have
    else:
        yield slice(0, rows)
        if count >= 2 * rows:
            with repetition.times(count // rows - 1):
                yield slice(rows, 2 * rows)
        if count % rows:
            yield slice(count - count % rows, count)


@contextmanager
def repeated_once(times: _Times, *, whole_chunks: bool) -> Iterator[None]:
    """Let `parts` yield one part in place of all whole parts but the first, inside the block.

    Args:
        times: Given how many parts a part stands for, returns a context in which operations count that often.
        whole_chunks: Whether a shorter last part is replaced by its share of a whole one. Losses of different numbers of rows then run the same
            operations and allocate the same memory, if they have several parts.
    """
    _open.append(_Repetition(times, whole_chunks))
    try:
        yield
    finally:
        _open.pop()
