"""Results whose shapes depend on values: from known values, or made up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

__all__ = ["READS", "READ_SCALAR", "is_mask", "made_up_answer", "shaped_by_known"]

aten = torch.ops.aten
READ_SCALAR = aten._local_scalar_dense.default
_EQUALITIES = (aten.equal.default, aten.allclose.default)

Known = Callable[[Tensor], Tensor | None]


def made_up_answer(func: Any, args: Any, kwargs: Mapping[str, Any], *, other: bool) -> tuple[Any, str, bool]:
    """Return a made-up answer, the answer in words, and whether it can decide a shape."""
    tensor = args[0]
    if func is READ_SCALAR:
        if tensor.dtype == torch.bool:
            return False, "False", False
        whole = 3 if other else 1
        return (1.0, "1.0", False) if tensor.is_floating_point() else (whole, str(whole), True)
    if func in _EQUALITIES:
        return True, "True", False
    results = _SHAPING[func](*args, share=2 if other else 1, **kwargs)
    found = [results] if isinstance(results, Tensor) else results
    return results, f"shapes {', '.join(str(list(one.shape)) for one in found)}", True


def _selected(tensor: Tensor, indices: Sequence[Tensor | None], *, share: int) -> Tensor:
    """Return the result of `tensor[mask]` if the mask selects one of `share` entries."""
    before, mask = next((place, index) for place, index in enumerate(indices) if index is not None and is_mask(index))
    kept = -(-mask.numel() // share)
    return tensor.new_empty((*tensor.shape[:before], kept, *tensor.shape[before + mask.dim() :]))


def _nonzero(tensor: Tensor, *, share: int) -> Tensor:
    return tensor.new_empty((-(-tensor.numel() // share), tensor.dim()), dtype=torch.int64)


def _masked(tensor: Tensor, mask: Tensor, *, share: int) -> Tensor:
    return tensor.new_empty((-(-max(tensor.numel(), mask.numel()) // share),))


def _unique(tensor: Tensor, *_: Any, share: int, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    entries = (min(share, tensor.numel()),)
    return (
        tensor.new_empty(entries),
        tensor.new_empty(tensor.shape, dtype=torch.int64),
        tensor.new_empty(entries, dtype=torch.int64),
    )


def _unique_rows(tensor: Tensor, dim: int, *_: Any, share: int, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = min(share, tensor.shape[dim])
    shape = [rows if index == dim % tensor.dim() else size for index, size in enumerate(tensor.shape)]
    return (
        tensor.new_empty(shape),
        tensor.new_empty((tensor.shape[dim],), dtype=torch.int64),
        tensor.new_empty((rows,), dtype=torch.int64),
    )


def _repeated(repeats: Tensor, *, share: int, output_size: int | None = None) -> Tensor:
    return repeats.new_empty((output_size or share * repeats.numel(),), dtype=torch.int64)


def _counted(tensor: Tensor, *_: Any, share: int, **__: Any) -> Tensor:
    return tensor.new_empty((share,))


def shaped_by_known(func: Any, args: Sequence[Any], known: Known) -> Any:
    """Return the results of an operation whose shapes depend on known values.

    Such arguments are the mask that selects entries of an unknown tensor, and the lengths of a loss over sequences.

    Args:
        func: One of `READS`, or `aten.index.Tensor` with a mask.
        args: Its arguments.
        known: Returns the known value of a tensor, None if it is unknown.

    Returns:
        The results; None if values are lacking.
    """
    rule = _BY_PART.get(func)
    return None if rule is None else rule(known, *args)


def _indexed(known: Known, tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    whole: list[Tensor | None] = []
    for index in indices:
        if index is None or not is_mask(index):
            whole.append(index)
            continue
        count = _true(known(index))
        if count is None:
            return None
        whole += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
    return aten.index.Tensor(tensor, whole)


def _masked_by_known(known: Known, tensor: Tensor, mask: Tensor) -> Tensor | None:
    value = known(mask)
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    with no_dispatch():
        value = None if value is None else value.expand(shape)
    count = _true(value)
    return None if count is None else tensor.new_empty((count,))


def _true(mask: Tensor | None) -> int | None:
    if mask is None:
        return None
    with no_dispatch():
        return int(mask.count_nonzero())


def _ctc_of_known(known: Known, logs: Tensor, _targets: Tensor, _steps: Any, lengths: Any, *_: Any) -> Any:
    if isinstance(lengths, Tensor):
        value = known(lengths)
        if value is None:
            return None
        with no_dispatch():
            lengths = value.tolist()
    return _ctc_results(logs, longest=max(lengths, default=0))


def _ctc(logs: Tensor, targets: Tensor, *_: Any, share: int, **__: Any) -> tuple[Tensor, Tensor]:
    return _ctc_results(logs, longest=-(-targets.shape[-1] // share))


def _ctc_results(logs: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
    """Return the losses and the forward variables.

    These have, for each row and step, an entry for each letter and for the blanks around it.
    """
    steps, rows = logs.shape[:2]
    return logs.new_empty((rows,)), logs.new_empty((rows, steps, 2 * longest + 1))


_SHAPING: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked,
    aten.index.Tensor: _selected,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_rows,
    aten.repeat_interleave.Tensor: _repeated,
    aten.bincount.default: _counted,
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss.Tensor: _ctc,
}
_BY_PART: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _indexed,
    aten.masked_select.default: _masked_by_known,
    aten._ctc_loss.default: _ctc_of_known,
    aten._ctc_loss.Tensor: _ctc_of_known,
}
READS = frozenset({READ_SCALAR, *_EQUALITIES, *_SHAPING} - {aten.index.Tensor})


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
