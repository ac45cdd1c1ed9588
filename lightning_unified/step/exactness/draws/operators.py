"""Random operators: which operators draw, and where their draw is."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CUDNN_STATE",
    "INDICES",
    "PERMUTES",
    "RRELU",
    "drawn_by",
    "is_inner",
    "is_random",
    "name_of_drawing",
    "parameters_of",
    "with_draw",
    "without_inner_dropout",
]

_SEEDED = torch.Tag.nondeterministic_seeded
_UNTAGGED = frozenset({"random", "random_", "binomial", "_fused_dropout"})  # torch 2.11 and 2.13 do not tag these
PERMUTES = frozenset({"randperm"})
INDICES = frozenset({"multinomial"})  # its entries are indices of columns, not of rows, so it can be sliced by rows
RRELU = "rrelu_with_noise"  # writes the drawn slopes into its second argument
CUDNN_STATE = "_cudnn_init_dropout_state"
_PARAMETERS = {  # the first and the last argument that set a distribution
    "normal": (0, 2),
    "bernoulli": (0, 1),
    "bernoulli_": (1, 2),
    "poisson": (0, 1),
    "binomial": (0, 2),
    "multinomial": (0, 1),
    "_standard_gamma": (0, 1),
    "_sample_dirichlet": (0, 1),
}


@cache
def name_of_drawing(func: Any) -> str | None:
    """Return the name of an operator that may draw; None for all other operators.

    The operator may draw inside its kernel.
    """
    name = func._schema.name.split("::")[1]
    return name if is_random(func, name) or is_inner(name) or name.startswith(RRELU) or "_rnn" in name else None


def is_random(func: Any, name: str) -> bool:
    """Return whether an operator draws from a generator."""
    return _SEEDED in func.tags or name in _UNTAGGED


def is_inner(name: str) -> bool:
    """Return whether an operator draws inside a larger kernel: attention, recurrent layers."""
    return "attention" in name or name.endswith("_rnn") or name == CUDNN_STATE


def without_inner_dropout(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return arguments with dropout 0 for kernels that draw inside, forward and backward."""
    name = func._schema.name
    if "attention" not in name and "_rnn" not in name:
        return args, kwargs
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            if kwargs.get(argument.name):
                kwargs = {**kwargs, argument.name: 0.0}
            elif index < len(args) and args[index]:
                args = (*args[:index], 0.0, *args[index + 1 :])
    return args, kwargs


def drawn_by(name: str, result: Any, args: Sequence[Any]) -> Any:
    """Return the draw of a random operator.

    It is the operator's result, the mask that it also returns, or an argument that it wrote.
    """
    if name == RRELU:
        return args[1]
    return result[1] if name in ("native_dropout", "_fused_dropout") else result


def parameters_of(name: str, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that set the distribution of a draw.

    Such are the probabilities of `bernoulli`.
    """
    first, last = _PARAMETERS.get(name, (0, 0))
    if name == "bernoulli" and len(args) > 1:  # with one probability, the tensor only gives the shape
        return []
    return [one for one in args[first:last] if isinstance(one, Tensor)]


def with_draw(name: str, result: Any, value: Tensor, args: Sequence[Any]) -> Any:
    """Return the operator's result for the draw `value`.

    Only dropout returns new tensors; other operators' results are overwritten.
    """
    if name in ("native_dropout", "_fused_dropout"):
        kept = args[1] if name == "_fused_dropout" else 1.0 - args[1]
        mask = value.to(result[1].dtype)
        return args[0] * mask / kept if kept else torch.zeros_like(args[0]), mask
    if name == RRELU:
        args[1].copy_(value)
        value = args[0] * args[1]
    result.copy_(value)
    return result
