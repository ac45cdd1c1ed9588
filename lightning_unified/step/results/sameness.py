"""Compare values of any kind up to rounding."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.step.results.objects import attributes_of

__all__ = ["same", "size_of"]

_LEAST = torch.finfo(torch.float32).tiny  # a smaller number is rounded to multiples of a fixed one; losses are float32


def same(one: Any, other: Any, *, tolerance: float = 0.0, size: float = 0.0) -> bool:
    """Return whether two values are equal up to rounding.

    NaN equals NaN. Containers are compared entry by entry, and unequal objects by their attributes.

    Args:
        one: A value.
        other: The value that it is compared with.
        tolerance: Largest difference that counts as rounding, relative to the largest entry of `other`.
        size: Magnitude that it is relative to at least; for results of sums, their largest summand.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one.detach(), other.detach(), tolerance, size)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and _same_arrays(one, other, tolerance, size)
    if isinstance(one, float) and isinstance(other, (int, float)):
        least = tolerance * max(size, _LEAST)
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=tolerance, abs_tol=least)
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(same(*pair, tolerance=tolerance) for pair in zip(one, other, strict=True))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], tolerance=tolerance) for key in one)
    if type(one) is not type(other):
        return False
    try:
        if one is other or bool(one == other):
            return True
    except (RuntimeError, TypeError, ValueError):  # a dataclass compares its tensors as tuples do
        pass
    mine, others = attributes_of(one), attributes_of(other)
    return bool(mine and others) and same(dict(mine or ()), dict(others or ()), tolerance=tolerance)


def _same_tensors(one: Tensor, other: Tensor, tolerance: float, size: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not other.layout:
        return False
    if one.layout is torch.sparse_coo:
        one, other = one.coalesce(), other.coalesce()
        places = one.indices().shape == other.indices().shape and bool(
            (one.indices() == other.indices().to(one.device)).all()
        )
        return places and _same_tensors(one.values(), other.values(), tolerance, size)
    if one.layout is not torch.strided:
        return False
    if one.device != other.device:
        other = other.to(one.device)
    if tolerance == 0.0 or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other) or (
            one.is_floating_point() and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
        )
    if one.numel() == 1 and one.is_floating_point():  # most logs: operations of tensors would take ten times as long
        return _same_numbers(float(one), float(other), tolerance, max(size, torch.finfo(one.dtype).tiny))
    size = max(size, size_of(other), torch.finfo(one.dtype).tiny)  # rounding scales with the largest summands
    return bool(torch.isclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True).all())


def _same_numbers(one: float, other: float, tolerance: float, size: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= tolerance * (max(size, abs(other)) + abs(other))


def _same_arrays(one: Any, other: Any, tolerance: float, size: float) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    size = max(size, float(np.abs(other[np.isfinite(other)]).max(initial=0.0)), float(np.finfo(one.dtype).tiny))
    return bool(np.isclose(one, other, rtol=tolerance, atol=tolerance * size, equal_nan=True).all())


def size_of(value: Any) -> float:
    """Return the largest finite magnitude in a number, tensor or array; 0.0 if there is none."""
    if isinstance(value, float):
        return abs(value) if math.isfinite(value) else 0.0
    entries = torch.as_tensor(value).detach()
    if entries.numel() == 1 and not entries.is_complex() and entries.layout is torch.strided:
        return size_of(float(entries))
    entries = entries.coalesce().values() if entries.layout is torch.sparse_coo else entries
    finite = entries[entries.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
