"""Checksums of tensors: whether entries changed, where no version counter tells."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Checksum", "checksum", "differing"]

_SAMPLES = 4096
_MOST = 1 << 27  # words that are read at most, 1 GiB: of a larger tensor only every second, third, …
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum, and the tensor's version counter when it was taken.

    Attributes:
        value: Two whole numbers, on the tensor's device.
        version: The counter.
    """

    value: Tensor
    version: int


def checksum(tensor: Tensor) -> Tensor:
    """Return two whole numbers that change if entries of `tensor` do, without waiting for its device.

    The first is the sum of all bits, eight bytes at a time: exact, for whole numbers wrap around. The second weighs some entries by
    their place, since a sum does not see entries that are exchanged for one another.
    """
    with torch.no_grad():
        words = _words(tensor.detach())
        words = words[:: -(-words.numel() // _MOST)]
        sample = words[:: max(words.numel() // _SAMPLES, 1)].to(torch.int64)
        places = torch.arange(1, sample.numel() + 1, device=sample.device)
        return torch.stack([words.sum(dtype=torch.int64), (sample * places).sum()])


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as a flat tensor of whole numbers, as wide as its size allows."""
    flat = tensor.contiguous().view(-1)
    width = 8
    while (flat.numel() * flat.element_size()) % width or (flat.storage_offset() * flat.element_size()) % width:
        width //= 2
    return flat.view(torch.uint8).view(_WIDTHS[width]) if flat.numel() else flat.new_zeros(1, dtype=torch.int64)


def differing(pairs: Mapping[Name, tuple[Tensor, Tensor]]) -> list[Name]:
    """Return the names of pairs of checksums that differ; waits for each device once."""
    by_device: dict[torch.device, list[Name]] = {}
    for name, (_, now) in pairs.items():
        by_device.setdefault(now.device, []).append(name)
    found: list[Name] = []
    for names in by_device.values():
        before, now = (torch.stack([pairs[name][side] for name in names]) for side in (0, 1))
        differ = (before.to(now.device) != now).any(1).tolist()
        found += [name for name, one in zip(names, differ, strict=True) if one]
    return found
