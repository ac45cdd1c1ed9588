"""Summands of a loss: the terms that its last operations add up, read from autograd's graph.

`mlm + 0.1 * nsp` has two summands. Each may be a mean over other terms, so each gets its own weight. The walk goes from the loss through
additions, constant factors, copies, and sums over a stack of scalars. What it meets then is a summand:

| loss | its summands |
|---|---|
| `F.cross_entropy(a, x) + F.cross_entropy(b, y)` | both |
| `0.5 * (a.mean() - b.mean())` | both means |
| `torch.stack([a, b]).mean()` | both |
| `torch.exp(-s) * a + s` | the product, and `s` |
| `loss + sum(p.square().sum() for p in parameters)` | those of `loss`, and one of all penalties of parameters |

A factor of the gradient that flows into a summand, not of any node, weights it: a node may be part of other summands too.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_unified.step.exactness.facts.labels import labels_of, saved
from lightning_unified.step.exactness.losses.summands.values import Edge

__all__ = ["LEAF", "MOST", "REST", "WHOLE", "Summand", "summands_of"]

MOST = 16  # summands of a loss; judgement: a check runs its rows once for each
REST = "what has no gradient"
WHOLE = -1
_NEAR = 64  # nodes between a summand and its nearest parameter
_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_FEW = 12  # nodes of a penalty of one parameter
_PARAMETERS = "penalties of parameters"
LEAF = "torch::autograd::AccumulateGrad"
_COPIES = {
    f"{name}Backward0"
    for name in (
        "ToCopy",
        "Alias",
        "Clone",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "T",
    )
} | {"TransposeBackward0", "PermuteBackward0", "SqueezeBackward1"}
# losses of single entries, whose mean divides by the number of these
_POINTWISE = {
    f"{name}Backward0"
    for name in ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
}
_SUMS, _MEANS = {"SumBackward0", "SumBackward1"}, {"MeanBackward0", "MeanBackward1"}
# operations that compute a penalty of a parameter from nothing else
_PENALTIES = (
    {
        f"{name}Backward0"
        for name in ("Pow", "Mul", "Abs", "Sum", "Mean", "Exp", "Log", "Neg", "Sqrt", "Div", "Norm", "LinalgVectorNorm")
    }
    | {"SoftplusBackward0", "SumBackward1", "NormBackward1"}
    | _COPIES
)
# operations that compute a trained weight of a loss
_WEIGHTS = _PENALTIES | {f"{name}Backward0" for name in ("Select", "Softmax", "Sigmoid", "Add", "Reciprocal", "Clamp")}


@dataclass(slots=True)
class Summand:
    """One summand of a loss.

    Args:
        key: A name that is the same in other micro-batches: of its first operation, and of the nearest layer with parameters.
        places: The nodes that add it up, each with the index of the input that it is; `WHOLE` for a node that is all of the loss.
        nodes: The nodes that computed it.
        value: Its share of the loss, with constant factors; None where unknown.
        divisor: The number that it is divided by, up to a constant factor; None where the graph does not hold it.
        is_zero: Whether it is multiplied by the number 0, to keep parameters in the graph or because a schedule leaves it out.
    """

    key: str
    places: list[tuple[Any, int]]
    nodes: list[Any]
    value: Tensor | None
    divisor: Tensor | float | None = None
    is_zero: bool = False


def summands_of(loss: Tensor, values: Mapping[Edge, Tensor], name_of: Callable[[Tensor], str]) -> list[Summand]:
    """Return the summands of a loss in the order of its graph; none if their values are unknown.

    What a loss has besides them, without a gradient, is a summand without places.

    Args:
        loss: The loss, before its backward pass.
        values: The scalars that the step computed, by their edges.
        name_of: Returns the name of the layer that holds a parameter.
    """
    found: list[Summand] = []
    penalties = Summand(_PARAMETERS, [], [], loss.detach().new_zeros(()))
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    for place, edge, factor in _added(loss.grad_fn, (loss.grad_fn, loss.output_nr), values):
        _, all_factors = _through_factors(edge[0], factor)
        is_zero = isinstance(all_factors, float) and all_factors == 0
        value = _value_of(edge, values)
        value = None if value is None else value.reshape(()) * factor
        if value is not None and penalties.value is not None and _is_penalty(edge[0]):
            penalties.places.append(place)
            penalties.nodes.append(edge[0])
            penalties.value = penalties.value + value
            penalties.is_zero = is_zero and (penalties.is_zero or len(penalties.nodes) == 1)
        else:
            found.append(Summand(_key_of(edge[0], name_of), [place], [edge[0]], value, _divisor_of(edge[0]), is_zero))
        if len(found) > MOST:
            return []
    found += [penalties] if penalties.places else []
    unknown = [one for one in found if one.value is None]
    if len(unknown) > 1:
        return []
    rest = loss.detach().reshape(()) - sum(one.value for one in found if one.value is not None)
    for one in unknown:
        one.value = rest
    _number_alike(found)
    return found if unknown else [*found, Summand(REST, [], [], rest)]


def _number_alike(found: list[Summand]) -> None:
    counts: Counter[str] = Counter()
    for one in found:
        counts[one.key] += 1
        if counts[one.key] > 1:
            one.key = f"{one.key} ({counts[one.key]})"


def _added(root: Any, edge: Edge, values: Mapping[Edge, Tensor]) -> Iterator[tuple[tuple[Any, int], Edge, Any]]:
    """Yield the place of each summand, its edge, and the factor between it and the loss."""
    waiting: list[tuple[tuple[Any, int] | None, Edge, Any]] = [(None, edge, 1.0)]
    seen: set[Any] = set()
    while waiting:
        place, edge, factor = waiting.pop()
        node, own = _through_factors(edge[0], factor)
        inputs = _inputs_of(node, own)
        if inputs is not None and _is_of_one_call(edge, inputs, values):
            inputs = None
        if inputs is None or (node in seen and node is not root):
            yield place or (root, WHOLE), edge, factor
            continue
        seen.add(node)
        waiting += [((at, index), (at.next_functions[index]), of) for at, index, of in reversed(inputs)]


def _is_of_one_call(edge: Edge, inputs: Iterable[tuple[Any, int, Any]], values: Mapping[Edge, Tensor]) -> bool:
    """Return whether one operation of the step computed a sum and its inputs.

    `cross_entropy` with smoothed labels does.
    """
    unknown = [at for at, index, _ in inputs if _value_of(at.next_functions[index], values) is None]
    return len(unknown) > 1 and _value_of(edge, values) is not None


def _through_factors(node: Any, factor: Any) -> tuple[Any, Any]:
    """Return the node behind copies and constant factors of one number, and their product."""
    while True:
        own = _factor_of(node)
        if own is None or (isinstance(own, Tensor) and own.numel() != 1):
            return node, factor
        factor = factor * (own.reshape(()) if isinstance(own, Tensor) else own)
        node = next(before for before, _ in node.next_functions if before is not None)


def _factor_of(node: Any) -> Any:
    """Return the constant factors of a node's one input; None for a node that does more."""
    name = node.name()
    inputs = [before is not None for before, _ in node.next_functions]
    if sum(inputs) != 1:
        return None
    if name in _COPIES:
        return 1.0
    if name in ("NegBackward0", "RsubBackward1"):
        return -1.0
    with suppress(RuntimeError):  # the factor was written in place
        if name == "MulBackward0":
            return _number(saved(node, "other" if inputs[0] else "self"))
        if name == "DivBackward0" and inputs[0]:
            divisor = _number(saved(node, "other"))
            return (
                None if divisor is None else 1.0 / divisor if isinstance(divisor, Tensor) or divisor else float("inf")
            )
    return None


def _number(factor: Any) -> Any:
    """Return one number that lies on the host as a number of Python, which promotes no tensor's format."""
    is_number = isinstance(factor, Tensor) and factor.numel() == 1 and factor.device.type == "cpu"
    if not is_number or factor.is_complex():
        return factor
    number: Any = factor if factor.dim() else factor.tolist()  # dispatch modes refuse `float` of a tensor made of one
    return float(number)


def _inputs_of(node: Any, factor: Any) -> list[tuple[Any, int, Any]] | None:
    """Return the inputs that a node adds up, each with its factor; None if it adds up nothing."""
    name = node.name()
    if name in ("AddBackward0", "SubBackward0"):
        alpha = saved(node, "alpha")
        factors = (factor, factor * (alpha if name == "AddBackward0" else -alpha))
        return [(node, at, factors[at]) for at, (before, _) in enumerate(node.next_functions) if before is not None]
    if name not in _SUMS | _MEANS:
        return None
    below, factors = node.next_functions[0][0], None
    while below is not None and below.name() not in ("StackBackward0", "CatBackward0"):
        own = _factor_of(below)
        if own is None:
            return None
        factors = own if factors is None else factors * own
        below = next(before for before, _ in below.next_functions if before is not None)
    sizes, inputs = saved(node, "self_sym_sizes") or (), [] if below is None else below.next_functions
    if tuple(sizes) != (len(inputs),) or not inputs:
        return None
    factor = factor / len(inputs) if name in _MEANS else factor
    one_each = isinstance(factors, Tensor) and factors.numel() == len(inputs)
    of = [
        factor * (1.0 if factors is None else factors.reshape(-1)[at] if one_each else factors)
        for at in range(len(inputs))
    ]
    return [(below, at, of[at]) for at, (before, _) in enumerate(inputs) if before is not None]


def _value_of(edge: Edge, values: Mapping[Edge, Tensor]) -> Tensor | None:
    """Return the value of a scalar; None where the step did not compute it by an operation that is seen."""
    node = edge[0]
    if node.name() == LEAF:
        return node.variable.detach().clone() if node.variable.numel() == 1 else None
    if (value := values.get(edge)) is not None:
        return value
    own = _factor_of(node)
    if own is None or (isinstance(own, Tensor) and own.numel() != 1):
        return None
    below = next(one for one in node.next_functions if one[0] is not None)
    value = _value_of(below, values)
    return None if value is None else value.reshape(()) * own


def _near(node: Any, most: int) -> Iterator[Any]:
    """Yield the nodes nearest to `node`, itself first; copies take no place."""
    waiting, seen, count = deque([node]), {node}, 0
    while waiting and count < most:
        node = waiting.popleft()
        if node.name() not in _COPIES:
            count += 1
            yield node
        before = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(before)
        if node.name() in _COPIES:
            waiting.extendleft(before)
        else:
            waiting.extend(before)


def _key_of(node: Any, name_of: Callable[[Tensor], str]) -> str:
    kind, _ = _through_factors(node, 1.0)
    parameter = next((one.variable for one in _near(kind, _NEAR) if one.name() == LEAF), None)
    what = kind.name().removesuffix("Backward0").removesuffix("Backward1").removeprefix("torch::autograd::")
    return what if parameter is None else f"{what} of {name_of(parameter)}"


def _is_penalty(node: Any, operations: Collection[str] = _PENALTIES) -> bool:
    """Return whether a summand, or a factor, is computed from parameters alone, by these operations."""
    near = list(_near(node, _FEW + 1))
    if len(near) > _FEW or any(one.name() not in operations and one.name() != LEAF for one in near):
        return False
    factors = (
        saved(one, which)
        for one in near
        if one.name() in ("MulBackward0", "DivBackward0")
        for which in ("self", "other")
    )
    return all(not isinstance(one, Tensor) or one.numel() == 1 for one in factors)


def _beside_parameters(node: Any) -> Any:
    """Return the node that a trained weight of a loss multiplies or divides; `node` itself without one."""
    while node.name() in ("MulBackward0", "DivBackward0"):
        inputs = [before for before, _ in node.next_functions]
        of_weight = [before is not None and _is_penalty(before, _WEIGHTS) for before in inputs]
        if None in inputs or sum(of_weight) != 1 or (of_weight[0] and node.name() == "DivBackward0"):
            break
        node = inputs[not of_weight[1]]
    return node


def _divisor_of(node: Any) -> Any:
    """Return the number that divides a summand, up to a constant factor; None where its graph does not hold it."""
    divisor, has_factor = 1.0, False
    while True:
        node = _beside_parameters(node)
        own = _factor_of(node)
        if own is None or (isinstance(own, Tensor) and own.numel() != 1):
            break
        has_factor = has_factor or node.name() in ("MulBackward0", "DivBackward0")
        divisor = divisor / own if isinstance(own, Tensor) or own else divisor  # a schedule's 0 divides by nothing
        node = next(before for before, _ in node.next_functions if before is not None)
    name = node.name()
    with suppress(RuntimeError):
        if labels_of(node) is not None:
            total = saved(node, "total_weight") if saved(node, "reduction") == _MEAN else None
            if has_factor and saved(node, "reduction") == _SUM:
                return divisor
            return divisor * total if isinstance(total, Tensor) else None
        if name == "MeanBackward0":
            return divisor * float(saved(node, "self_sym_numel"))
        if name in _POINTWISE:
            entries = saved(node, "self") if saved(node, "reduction") == _MEAN else None
            if has_factor and saved(node, "reduction") == _SUM:
                return divisor
            return divisor * float(entries.numel()) if isinstance(entries, Tensor) else None
    return divisor if has_factor and name in _SUMS else None
