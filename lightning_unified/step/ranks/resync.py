"""Resync: a rank whose optimizer step failed copies weights and state from another rank."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_unified.errors import OutOfMemoryError, RankError
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks, Word
from lightning_unified.step.ranks.reduction import flat_memory
from lightning_unified.step.recovery.oom import caught

__all__ = ["resync"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blank:
    """The place of a tensor in pickled state; the tensor itself is sent afterwards."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def resync(optimizer: Optimizer, precision: Precision, ranks: Ranks, *, source: int, lacks: bool) -> None:
    """Copy weights, optimizer state and loss scale from rank `source` to every rank.

    All ranks call it after an optimizer step that succeeded on `source`. It overwrites everything a failed step left,
    even half-written weights. Ranks whose step succeeded receive the same bits that they have.

    Args:
        optimizer: The optimizer that stepped.
        precision: The precision plugin, whose scaler, if any, stepped with it.
        ranks: All ranks of the run.
        source: The rank to copy from.
        lacks: Whether this rank's step failed.

    Raises:
        OutOfMemoryError: On a rank that has no memory for missing optimizer state.
        RankError: On the other ranks in that case.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors: list[Tensor] = []
    packed, reason = b"", None
    if ranks.rank == source:
        packed = pickle.dumps(_mapped(_books(optimizer, parameters, precision), partial(_blanked, tensors)))
    ranks.meet(Point.RESYNC)
    books = pickle.loads(ranks.broadcast_object(packed, source=source))  # noqa: S301  another rank of this run pickled it
    if ranks.rank != source:
        mine = _books(optimizer, parameters, precision)
        books, reason = caught(partial(_filled, books, mine, parameters[0].device, tensors))
    pieces = [flat_memory(tensor.detach()).view(torch.uint8) for tensor in (*parameters, *tensors) if tensor.numel()]
    words = ranks.meet(Point.RESYNC, Outcome.WELL if reason is None else Outcome.SHORT, text=reason or "")
    _raise_if_short(words, ranks, source=source)
    for piece in pieces:
        ranks.broadcast(piece, source=source)
    if lacks and books is not None:
        _write_books(optimizer, parameters, precision, books)


def _raise_if_short(words: list[Word], ranks: Ranks, *, source: int) -> None:
    short = [word for word in words if word.outcome is not Outcome.WELL]
    if not short:
        return
    ranks.end()
    mine = words[ranks.rank]
    if mine.outcome is Outcome.WELL:
        raise RankError(f"rank {short[0].rank} has no memory for its optimizer state: {short[0].text}")
    raise OutOfMemoryError(
        f"the optimizer's state does not fit on rank {ranks.rank}, though it does on rank {source} ({mine.text}). Give this rank as much "
        "memory as the others, or choose an optimizer that holds less (SGD, Adafactor, one in 8 bits)."
    )


def _books(optimizer: Optimizer, parameters: list[Tensor], precision: Precision) -> dict[str, Any]:
    """Return the state besides weights that a step may have changed.

    States are read from the optimizer's existing entries, so that reading creates none.
    """
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    return {
        "state": {
            (numbers.get(id(key), key) if isinstance(key, Tensor) else key): value
            for key, value in optimizer.state.items()
        },
        "groups": [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ],
        "precision": precision.state_dict(),
    }


def _write_books(optimizer: Optimizer, parameters: list[Tensor], precision: Precision, books: dict[str, Any]) -> None:
    optimizer.state.clear()
    for key, value in books["state"].items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value
    for group, options in zip(optimizer.param_groups, books["groups"], strict=True):
        group.update(options)
    if books["precision"]:
        precision.load_state_dict(books["precision"])


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `change` applied, in order, to each tensor in its dicts and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(entry, change) for entry in value])
    return value


def _blanked(tensors: list[Tensor], tensor: Tensor) -> _Blank:
    tensors.append(tensor)
    on_host = tensor.device.type == "cpu"
    return _Blank(shape=tuple(tensor.shape), strides=tensor.stride(), dtype=tensor.dtype, on_host=on_host)


def _filled(value: Any, mine: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    """Return `value` with a tensor for each blank: this rank's own if it fits, else a new one."""
    if isinstance(value, _Blank):
        tensors.append(mine if _fits(mine, value) else _made(value, device))
        return tensors[-1]
    if isinstance(value, dict):
        at = mine if isinstance(mine, dict) else {}
        return {key: _filled(entry, at.get(key), device, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        at = list(mine) if isinstance(mine, (list, tuple)) and len(mine) == len(value) else [None] * len(value)
        return type(value)([_filled(*pair, device, tensors) for pair in zip(value, at, strict=True)])
    return value


def _fits(mine: Any, blank: _Blank) -> bool:
    return isinstance(mine, Tensor) and _blanked([], mine) == blank


def _made(blank: _Blank, device: torch.device) -> Tensor:
    home = torch.device("cpu") if blank.on_host else device
    return torch.empty_strided(blank.shape, blank.strides, dtype=blank.dtype, device=home)
