"""Make random operators return constants, the same for each row: a step without noise."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.draws.operators import INDICES, PERMUTES, RRELU, drawn_by, with_draw
from lightning_unified.step.exactness.draws.replay import InterceptDraws

__all__ = ["ConstantDraws"]


class ConstantDraws(InterceptDraws):
    """Makes random operators return constants, the same for each row: a step without noise.

    | draw | constant |
    |---|---|
    | uniform | at a given share of the range, by default the middle |
    | normal | half a standard deviation above the mean |
    | dropout | all entries are kept |
    | integers | the lowest one |
    | permutation | each entry moves by one place |

    A step that mixes rows by a permutation thus still mixes rows. A step that does so only if a uniform draw is below some probability does
    with a small share.

    Args:
        share: The place of uniform draws in their range, from 0 to 1.
    """

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self._share = share

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and overwrite its draw with the constant."""
        result = func(*args, **kwargs)
        drawn = drawn_by(name, result, args)
        if not isinstance(drawn, Tensor):
            return result
        return with_draw(name, result, _constant(name, func, drawn, args, kwargs, share=self._share), args)


def _constant(
    name: str, func: Any, drawn: Tensor, args: Sequence[Any], kwargs: dict[str, Any], *, share: float
) -> Tensor:
    base = name.rstrip("_").removesuffix("_like")
    like = torch.empty_like(drawn)
    if base == RRELU:
        low, high = (
            _argument(func, args, kwargs, (which,), value) for which, value in (("lower", 1 / 8), ("upper", 1 / 3))
        )
        return like.fill_(1.0).masked_fill_(args[0] <= 0, (low + high) / 2)
    if base in PERMUTES or base in INDICES:
        places = torch.arange(drawn.shape[-1], device=drawn.device).to(drawn.dtype).expand_as(drawn)
        return places.roll(1, -1) if base in PERMUTES else places
    if base in ("randint", "random"):
        return like.fill_(_argument(func, args, kwargs, ("low", "from"), 0.0))
    if base == "uniform":
        low, high = (_argument(func, args, kwargs, names, value) for names, value in ((("from",), 0.0), (("to",), 1.0)))
        return like.fill_(low + share * (high - low))
    if base == "normal":
        mean, deviation = (
            _argument(func, args, kwargs, (which,), value) for which, value in (("mean", 0.0), ("std", 1.0))
        )
        return like.fill_(mean + 0.5 * deviation)
    return like.fill_({"rand": share, "randn": 0.5}.get(base, 1.0))


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], default: float) -> float:
    """Return a numeric argument of an operator by name.

    Return `default` if the argument is a tensor, None or missing.
    """
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            value = kwargs.get(argument.name, args[index] if index < len(args) else default)
            return default if value is None or isinstance(value, Tensor) else float(value)
    return default
