"""Operations of a loss that bend a value, or count it by a number, read from autograd's nodes.

| operation near the loss | what is noted of each micro-batch |
|---|---|
| relu, abs, clamp, hardtanh, threshold, smooth L1 and Huber losses, maximum, minimum, where | the sides on which its entries lie, and a number that tells which entries |
| clamp, hardtanh, threshold, maximum, minimum of one value | that value and the limit, as the sum of all micro-batches may cross it |
| softplus, softshrink, hardsigmoid, prelu, elu, logaddexp and others, of a few values | the same |
| the largest or smallest of a few values, their order, logsumexp | which one it is, or a number that tells the order |
| multiplication by a few numbers, or division; a power, a factor of a sum | the number, or one computed from a few |
| multiplication by several factors, or division | whether they are equal |
| masked_fill, a mask as an index, labels that a cross-entropy ignores | whether some entries are left out, and whether some are not |
| class weights of a cross-entropy | the sum, the mean, the smallest and the largest weight of a scored label |
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.labels import NUMBER, figures_of_labels, labels_of, saved

__all__ = ["LIMIT", "NUMBER", "PLACES", "figures_of", "may_hide"]

_MOST = 4096  # entries of a bent tensor; larger ones hold positions of rows, not means over rows
_FEW = 16  # values of which the largest is taken, such as the losses of some tasks
_FLAT = 8.0  # softplus(x) is 0 or x up to 3e-4 beyond

_HIDING = (  # operations that leave out values which are not finite, though these get gradients
    *("NanToNum", "Nansum", "Where", "MaskedFill", "MaskedScatter", "MaskedSelect", "Index", "CopySlices"),
    *("Fmax", "Fmin"),
)
_COMPILED = "CompiledFunction"

PLACES = " at some places"
LIMIT = " up to a limit"


def may_hide(nodes: list[Any]) -> bool:
    """Return whether a loss may be finite where its gradient is not.

    `nan_to_num(total / count)` and `where(count > 0, total / count, 0)` are 0 for no terms, and their gradient is 0 / 0. A custom function may
    hold them, and so may a compiled loss; compiled blocks are as near to most losses.
    """
    is_compiled = bool(nodes) and nodes[0].name().startswith(_COMPILED)
    return is_compiled or any(node.name().startswith(_HIDING) or _is_custom(node) for node in nodes)


def _is_custom(node: Any) -> bool:
    """Return whether a node is a function of Python code that is not ours, and not compiled."""
    own = getattr(node, "_forward_cls", None)
    return own is not None and not (
        own.__module__.startswith("lightning_unified.") or node.name().startswith(_COMPILED)
    )


def figures_of(nodes: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each bend, and two figures: its lowest and highest side, or a number twice."""
    for node in nodes:
        name = node.name()
        with suppress(RuntimeError):  # a saved tensor was written in place, or is freed
            if (factors := _factors_of(node, name)) is not None:
                low, high = torch.aminmax(factors.float())
                yield f"{name} by equal factors", (low == high).float().expand(2)
            if (number := _number_of(node, name)) is not None:
                yield name + NUMBER, number.reshape(1).expand(2)
            elif (labels := labels_of(node)) is not None:
                yield from ((f"{name} {what}", pair) for what, pair in figures_of_labels(labels))
            elif name in _SIDES:
                sides = _SIDES[name](node)
                if sides is not None and 0 < sides.numel() <= _MOST:
                    yield name, torch.stack(torch.aminmax(sides))
                    if sides.numel() > 1:
                        yield name + PLACES, _told_apart(sides).reshape(1).expand(2)
                yield from ((f"{name} {at}{LIMIT}", pair) for at, pair in enumerate(_limited(node, name)))


def _limited(node: Any, name: str) -> Iterator[Tensor]:
    """Yield the one value that a node bends, beside each limit of it."""
    value = saved(node, "self") if name in _LIMITS else None
    if not isinstance(value, Tensor) or value.numel() != 1:
        return
    for limit in (saved(node, attribute) for attribute in _LIMITS[name]):
        if limit is not None and (not isinstance(limit, Tensor) or limit.numel() == 1):
            yield torch.stack((value.reshape(()), torch.as_tensor(limit).to(value).reshape(())))


_LIMITS: dict[str, tuple[str, ...]] = {
    "ClampBackward0": ("min", "max"),
    "ClampBackward1": ("min", "max"),
    "ClampMinBackward0": ("min",),
    "ClampMaxBackward0": ("max",),
    "HardtanhBackward0": ("min_val", "max_val"),
    "ThresholdBackward0": ("threshold",),
    "MaximumBackward0": ("other",),
    "MinimumBackward0": ("other",),
}


def _number_of(node: Any, name: str) -> Tensor | None:
    """Return the number by which a node counts a loss, or one computed from a few.

    None if a gradient flows to it.
    """
    if name not in _OPERANDS:
        return None
    operands = _OPERANDS[name]
    if len(operands) == 1:
        number = getattr(node, f"_saved_{operands[0]}", None)
        return torch.tensor(float(number)) if isinstance(number, (int, float)) else None
    number = _constant_of(node, operands)
    if not isinstance(number, Tensor) or not 0 < number.numel() <= _FEW or number.is_complex():
        return None
    return number if number.numel() == 1 else _told_apart(number)


def _constant_of(node: Any, operands: tuple[str, ...]) -> Any:
    """Return the one of a node's two operands to which no gradient flows; None if there is none."""
    first, second = (before for before, _ in node.next_functions[:2])
    which = operands[1] if second is None else operands[0] if first is None else None
    return None if which is None else saved(node, which)


def _factors_of(node: Any, name: str) -> Tensor | None:
    """Return the factors of several values, such as the weights of rows; None for other nodes.

    `weights / weights.max()` is 1 in every micro-batch until the weights differ.
    """
    if name not in ("MulBackward0", "DivBackward0", "DotBackward0"):
        return None
    factors = _constant_of(node, _OPERANDS[name])
    is_known = isinstance(factors, Tensor) and 1 < factors.numel() <= _MOST and not factors.is_complex()
    return factors if is_known else None


_OPERANDS: dict[str, tuple[str, ...]] = {
    "MulBackward0": ("self", "other"),
    "DivBackward0": ("", "other"),
    "DotBackward0": ("self", "tensor"),
    "MvBackward0": ("self", "vec"),
    "PowBackward0": ("exponent",),
    "AddBackward0": ("alpha",),
    "SubBackward0": ("alpha",),
}


def _told_apart(few: Tensor) -> Tensor:
    """Return a number that differs for other values, or for the same ones in another order."""
    weights = torch.arange(1, few.numel() + 1, device=few.device, dtype=torch.float32).sqrt()
    return (few.reshape(-1).float() * weights).sum()


def _between(low: str, high: str, node: Any) -> Tensor | None:
    """Return whether each entry is below a range, in it or above it."""
    value = saved(node, "self")
    if not isinstance(value, Tensor) or value.numel() > _MOST:
        return None
    sides = torch.zeros_like(value, dtype=torch.float32)
    for limit, side in ((saved(node, low), -1.0), (saved(node, high), 1.0)):
        if limit is not None:
            sides = torch.where(value < limit if side < 0 else value > limit, side, sides)
    return sides


def _above(name: str, limit: str | None = None) -> Callable[[Any], Tensor | None]:
    def sides(node: Any) -> Tensor | None:
        value, over = saved(node, name), 0.0 if limit is None else saved(node, limit)
        if not isinstance(value, Tensor) or value.numel() > _MOST or over is None:
            return None
        return (value > over).float()

    return sides


def _few_above(name: str, limit: float | str = 0.0) -> Callable[[Any], Tensor | None]:
    """Return a function that tells on which side of a limit, and of its negative, a few values lie."""

    def sides(node: Any) -> Tensor | None:
        value = saved(node, name)
        edge = abs(float(saved(node, limit))) if isinstance(limit, str) else limit
        if not isinstance(value, Tensor) or value.numel() > _FEW:
            return None
        return (value > edge).float() - (value < -edge).float()

    return sides


def _few_larger(node: Any) -> Tensor | None:
    value, other = saved(node, "self"), saved(node, "other")
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)) or max(value.numel(), other.numel()) > _FEW:
        return None
    return (value > other).float()


def _on_softplus(node: Any) -> Tensor | None:
    value = saved(node, "self")
    if not isinstance(value, Tensor) or value.numel() > _FEW:
        return None
    scaled = value * float(saved(node, "beta"))
    return (scaled > _FLAT).float() - (scaled < -_FLAT).float()


def _order(node: Any) -> Tensor | None:
    places = saved(node, "indices")
    return _told_apart(places) if isinstance(places, Tensor) and 0 < places.numel() <= _FEW else None


def _largest(node: Any) -> Tensor | None:
    value = saved(node, "self")
    return value.reshape(-1).argmax().float() if isinstance(value, Tensor) and value.numel() <= _FEW else None


def _is_masked(node: Any) -> Tensor | None:
    mask = saved(node, "mask")
    return mask.any().float() if isinstance(mask, Tensor) else None


def _takes_all(node: Any) -> Tensor | None:
    """Return whether the indices of a node take all entries of the dimensions that they index."""
    if node.name() == "MaskedSelectBackward0":
        mask = saved(node, "mask")
        return mask.all().float() if isinstance(mask, Tensor) else None
    places, sizes = saved(node, "indices") or (), saved(node, "self_sym_sizes")
    indices = [one for one in places if one is not None]
    if not indices:
        return None
    if len(indices) == 1 and indices[0].dtype in (torch.bool, torch.uint8):
        return indices[0].all().float()
    size = max(sizes[place] for place, one in enumerate(places) if one is not None)
    return torch.tensor(float(max(one.numel() for one in indices) >= size))


def _far(limit: str) -> Callable[[Any], Tensor | None]:
    def sides(node: Any) -> Tensor | None:
        value, target = saved(node, "self"), saved(node, "target")
        if not (isinstance(value, Tensor) and isinstance(target, Tensor)) or value.numel() > _MOST:
            return None
        off = value - target
        return (off > saved(node, limit)).float() - (off < -saved(node, limit)).float()

    return sides


def _chosen(node: Any) -> Tensor | None:
    value, best = saved(node, "self"), saved(node, "result")
    if not (isinstance(value, Tensor) and isinstance(best, Tensor)) or value.numel() > _FEW or best.numel() != 1:
        return None
    return (value == best).reshape(-1).float().argmax().float()


def _place(node: Any) -> Tensor | None:
    places = saved(node, "indices")
    return places.float() if isinstance(places, Tensor) and places.numel() == 1 else None


def _condition(node: Any) -> Tensor | None:
    condition = saved(node, "condition")
    return condition.float() if isinstance(condition, Tensor) and condition.numel() <= _MOST else None


_SIDES: dict[str, Callable[[Any], Tensor | None]] = {
    "SoftplusBackward0": _on_softplus,
    "SoftshrinkBackward0": _few_above("self", "lambd"),
    "HardshrinkBackward0": _few_above("self", "lambd"),
    "HardsigmoidBackward0": _few_above("self", 3.0),
    "HardswishBackward0": _few_above("self", 3.0),
    "PreluKernelBackward0": _few_above("self"),
    "EluBackward0": _few_above("self"),
    "CeluBackward0": _few_above("self"),
    "FmaxBackward0": _few_larger,
    "FminBackward0": _few_larger,
    "LogaddexpBackward0": _few_larger,
    "Logaddexp2Backward0": _few_larger,
    "LogsumexpBackward0": _largest,
    "TopkBackward0": _order,
    "SortBackward0": _order,
    "MaskedFillBackward0": _is_masked,
    "IndexBackward0": _takes_all,
    "MaskedSelectBackward0": _takes_all,
    "ReluBackward0": _above("result"),
    "LeakyReluBackward0": _above("self"),
    "AbsBackward0": _above("self"),
    "ThresholdBackward0": _above("self", "threshold"),
    "ClampBackward0": lambda node: _between("min", "max", node),
    "ClampBackward1": lambda node: _between("min", "max", node),
    "ClampMinBackward0": lambda node: _between("min", "max", node),
    "ClampMaxBackward0": lambda node: _between("min", "max", node),
    "HardtanhBackward0": lambda node: _between("min_val", "max_val", node),
    "MaximumBackward0": _above("self", "other"),
    "MinimumBackward0": _above("self", "other"),
    "WhereBackward0": _condition,
    "MaxBackward0": _place,
    "MinBackward0": _place,
    "MaxBackward1": _chosen,
    "MinBackward1": _chosen,
    "AmaxBackward0": _chosen,
    "AminBackward0": _chosen,
    "SmoothL1LossBackward0": _far("beta"),
    "HuberLossBackward0": _far("delta"),
}
