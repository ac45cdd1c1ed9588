"""Split the arguments of one encoder call into chunks of rows, and merge the results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.step.split import bounds
from lightning_unified.step.split.containers import entries_of, joined, with_entries

__all__ = ["EncoderCall", "NotRowWiseError", "call_rows", "empty_like", "leaves_of", "mapped", "merged", "split_call"]

_PLAIN = (str, bytes, int, float, list, tuple, dict, torch.device)


class NotRowWiseError(Exception):
    """Raised for a result that does not consist of rows; the text names it and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCall:
    """One call of an encoder.

    Attributes:
        name: The encoder's name.
        encoder: The encoder.
        function: Runs the encoder on a dict of arguments.
        arguments: The arguments, by position and by name.
        roles: Whether each argument is split, by path.
        sizes: Rows of each chunk.
    """

    name: str
    encoder: nn.Module
    function: Callable[[dict[Any, Any]], Any]
    arguments: dict[Any, Any]
    roles: Mapping[str, bool]
    sizes: Sequence[int]

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that calls share if checking one of them is enough."""
        leaves = [(path, self.roles[path], getattr(leaf, "dtype", str)) for path, leaf in leaves_of(self.arguments)]
        return self.name, self.encoder.training, torch.is_grad_enabled(), *leaves

    def with_arguments(self, arguments: dict[Any, Any], sizes: Sequence[int]) -> "EncoderCall":
        """Return the same call with the arguments of other rows."""
        return replace(self, arguments=arguments, sizes=sizes)


def call_rows(call: Any) -> int | None:
    """Return the number of rows of a call; None if it has no rows.

    It is the first dimension of the first tensor, or else the length of the first list of strings.
    """
    leaves = [leaf for _, leaf in leaves_of(call)]
    tensors = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    texts = [len(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    return next(iter(tensors + texts), None)


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and the lists of strings in `value`, each with its path."""
    if isinstance(value, Tensor) or _is_texts(value):
        yield path, value
    else:
        for name, entry in entries_of(value) or []:
            yield from leaves_of(entry, joined(path, name))


def split_call(call: EncoderCall, sizes: Sequence[int]) -> list[dict[Any, Any]]:
    """Return the arguments of a call for each chunk; shared arguments go into each chunk whole."""
    pieces: dict[str, Any] = {}
    for path, leaf in leaves_of(call.arguments):
        if call.roles[path]:
            # one operation for all chunks: its backward is one concatenation
            spans = bounds(sizes)
            pieces[path] = leaf.split(list(sizes)) if isinstance(leaf, Tensor) else [leaf[slice(*one)] for one in spans]

    def chunk(at: int) -> dict[Any, Any]:
        return mapped(call.arguments, lambda path, leaf: pieces[path][at] if path in pieces else leaf)

    return [chunk(at) for at in range(len(sizes))]


def merged(parts: Sequence[Any], sizes: Sequence[int], path: str = "") -> Any:
    """Return the result of a whole call, merged from the results of its chunks.

    `path` is the path of the result, for messages.

    Raises:
        NotRowWiseError: If an entry is neither made of rows nor the same object in all chunks.
    """
    first, where = parts[0], path or "its output"
    if len(parts) == 1 or all(part is first for part in parts):
        return first
    if any(type(part) is not type(first) for part in parts):
        raise NotRowWiseError(f"{where} has other types in other chunks")
    if isinstance(first, Tensor):
        return _concatenated(parts, sizes, where)
    names = [[name for name, _ in (entries_of(part) or [])] for part in parts]
    if names[0] and all(some == names[0] for some in names):
        columns = zip(*([entry for _, entry in (entries_of(part) or [])] for part in parts), strict=True)
        entries = (merged(column, sizes, joined(path, name)) for name, column in zip(names[0], columns, strict=True))
        return with_entries(first, list(zip(names[0], entries, strict=True)))
    if not any(names) and isinstance(first, _PLAIN) and all(part == first for part in parts):
        return first
    raise NotRowWiseError(
        f"{where} is a {type(first).__name__}, which cannot be merged; return tensors of one entry a row"
        + (" (use_cache=False)" if "cache" in type(first).__name__.lower() else "")
    )


def empty_like(part: Any, *, rows: int, of: int) -> Any:
    """Return an uninitialised result for a chunk of `of` rows.

    Its shapes follow `part`, the result of a chunk of `rows` rows.
    """

    def emptied(_: str, leaf: Any) -> Any:
        is_by_row = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % rows == 0
        return leaf.detach().new_empty(leaf.shape[0] // rows * of, *leaf.shape[1:]) if is_by_row else leaf

    return mapped(part, emptied)


def _concatenated(parts: Sequence[Tensor], sizes: Sequence[int], where: str) -> Tensor:
    first, rows = parts[0], sizes[0]
    entries = first.shape[0] // rows if first.dim() else 0  # entries per row: an encoder may return several
    fits = all(
        part.dim() and part.shape[0] == entries * size and part.shape[1:] == first.shape[1:]
        for part, size in zip(parts, sizes, strict=True)
    )
    if not entries or not fits:
        shapes = ", ".join(
            f"{tuple(part.shape)} of {size} rows" for part, size in list(zip(parts, sizes, strict=True))[-2:]
        )
        raise NotRowWiseError(f"{where} has no first dimension of rows ({shapes})")
    return torch.cat(list(parts))


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return `value` with its tensors and lists of strings replaced by `change(path, leaf)`."""
    if isinstance(value, Tensor) or _is_texts(value):
        return change(path, value)
    entries = entries_of(value) or []
    if not entries:
        return value
    return with_entries(value, [(name, mapped(entry, change, joined(path, name))) for name, entry in entries])


def _is_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(entry, str) for entry in value)
