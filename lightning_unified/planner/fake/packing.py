"""Packed sequences of fake tensors.

torch packs and unpacks with the lengths' values, which it reads from memory that fake tensors lack. The same steps are taken here
with the known values of the lengths.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import _VF, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from typing_extensions import override

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.planner.fake.known_values import Answers, set_value

__all__ = ["packed_by_value"]


@contextmanager
def packed_by_value(answers: Answers) -> Iterator[None]:
    """Pack, run and unpack fake sequences by the values that `answers` knows.

    Sequences of unknown lengths count as full; that is noted.
    """
    rules: dict[str, Callable[..., Any]] = {"_pack_padded_sequence": _pack, "_pad_packed_sequence": _unpack}
    with ExitStack() as stack:
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            stack.enter_context(replaced(_VF, name, partial(_recur, getattr(_VF, name), answers)))
        for name, rule in rules.items():
            plain = getattr(_VF, name)
            stack.enter_context(replaced(_VF, name, partial(_when_fake, plain, partial(rule, answers))))
        yield


def _when_fake(plain: Callable[..., Any], rule: Callable[..., Any], first: Tensor, *args: Any) -> Any:
    return (rule if isinstance(first, FakeTensor) else plain)(first, *args)


def _recur(plain: Callable[..., Any], answers: Answers, first: Tensor, second: Any, *args: Any) -> Any:
    """Run a recurrence, which takes the steps of packed rows one by one as their sizes say."""
    sizes = answers.known(second) if isinstance(second, FakeTensor) else None
    return plain(first, second if sizes is None else sizes, *args)


def _pack(answers: Answers, source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    value = answers.known(lengths)
    if value is None:
        answers.note("aten._pack_padded_sequence.default", "full lengths", shapes=True)
        with no_dispatch():
            value = torch.full((lengths.numel(),), source.shape[1 if batch_first else 0])
    with no_dispatch():
        descending = value.tolist()
        sizes = (value[None] > torch.arange(descending[0])[:, None]).sum(1)
    data = _Pack.apply(source.transpose(0, 1) if batch_first else source, _runs(descending))
    return data, set_value(torch.empty(len(sizes), dtype=torch.int64), sizes)  # pyright: ignore[reportReturnType]


def _unpack(
    answers: Answers, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the padded rows and their lengths, as torch's `_pad_packed_sequence` makes them."""
    value = answers.known(batch_sizes)
    assert value is not None, "sizes of a packed sequence are made in `_pack`"
    with no_dispatch():
        sizes = value.tolist()
        lengths = (value[:, None] > torch.arange(sizes[0])[None]).sum(0)
    steps = max(len(sizes), total_length)
    out = torch.full((steps, sizes[0], *data.shape[1:]), padding, dtype=data.dtype)
    taken = 0
    for first, last, rows in _runs(lengths.tolist()):
        part = data[taken : taken + (last - first) * rows]
        out[first:last, :rows].copy_(part.view(last - first, rows, *data.shape[1:]))
        taken += (last - first) * rows
    padded = out.transpose(0, 1) if batch_first else out
    return padded, set_value(torch.empty(sizes[0], dtype=torch.int64), lengths)


def _runs(descending: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of steps with equally many rows: first step, last step and rows."""
    edges = [0, *sorted(set(descending))]
    return [
        (first, last, sum(length >= last for length in descending)) for first, last in pairwise(edges) if last > first
    ]


class _Pack(torch.autograd.Function):
    """Copies each run of steps, and joins the copies, as torch's `_pack_padded_sequence` does."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        source, runs = args
        ctx.shape, ctx.runs = source.shape, runs
        parts = [source[first:last, :rows].contiguous().flatten(0, 1) for first, last, rows in runs]
        return torch.cat(parts)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = gradients[0].new_zeros(ctx.shape)
        taken = 0
        for first, last, rows in ctx.runs:
            part = gradients[0][taken : taken + (last - first) * rows]
            whole[first:last, :rows].copy_(part.view(last - first, rows, *ctx.shape[2:]))
            taken += (last - first) * rows
        return whole, None
