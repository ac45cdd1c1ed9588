"""Record the random draws of a whole run, and replay each micro-batch's share of them.

A module with dropout or noise draws different numbers when its rows run in micro-batches, so its gradients cannot be compared.
`RecordDraws` records the result of every random operator while all rows run together. `ReplayDraws` runs the operators again on a
micro-batch, and overwrites their results with the entries of its rows. The gradients of a module with dropout or noise then agree up to
rounding.

`ReplayDraws` finds the entries of a micro-batch in a recorded draw by shape:

1. The draw has the same shape in the micro-batch: it does not depend on the rows, and is used unchanged.
2. One dimension is k times the number of rows, in both runs: the draw is sliced by rows. With k > 1 there are two orders, and
   the check tries both: `"interleaved"` (row 0 k times, row 1 k times, …) and `"blocks"` (all rows, k times over).
3. Any other draw makes the replay invalid. This includes a permutation of the rows, which has no entries per row.

Some kernels draw inside, such as fused attention and cuDNN's recurrent layers. They run without dropout in both modes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ConstantDraws", "Draw", "DrawMode", "NoDraws", "Order", "RecordDraws", "ReplayDraws", "WatchPrecision"]

Order = Literal["interleaved", "blocks"]

_SEEDED = torch.Tag.nondeterministic_seeded
_UNTAGGED = frozenset({"random", "random_", "binomial", "_fused_dropout"})  # torch 2.11 and 2.13 do not tag these
_PERMUTES = frozenset({"randperm"})
_INDICES = frozenset({"multinomial"})  # its entries are indices of columns, not of rows, so it can be sliced by rows
_RRELU = "rrelu_with_noise"  # writes the drawn slopes into its second argument
_CUDNN_STATE = "_cudnn_init_dropout_state"
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Draw:
    """The result of one random operator.

    Args:
        name: The name of the operator, without its namespace.
        value: The operator's result on the host; for `native_dropout`, the drawn mask.
    """

    name: str
    value: Tensor


@dataclass
class WatchPrecision:
    """Records the 16-bit formats of operators' results; they decide how coarsely a run rounds.

    Attributes:
        dtypes: The 16-bit formats recorded.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)

    def look(self, result: Any) -> None:
        """Record the formats of an operator's results."""
        tensors = (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ()
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.dtype in _LOW:
                self.dtypes.add(tensor.dtype)


class _Draws(TorchDispatchMode):
    """Passes every random operator to `draw`; all other operators run unchanged.

    Attributes:
        leaves_out: Whether a kernel that draws inside has run without its dropout.
        covers_backward: Whether the backward pass runs in the mode too. There, recomputed activations draw again, and kernels that draw
            inside have backward kernels. The backward pass takes half of the mode's time.
    """

    def __init__(self, precision: WatchPrecision, *, covers_backward: bool = True) -> None:
        super().__init__()
        self._precision, self._covers_backward = precision, covers_backward
        self.leaves_out = False

    @property
    def covers_backward(self) -> bool:
        return self._covers_backward or self.leaves_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of_drawing(func)
        if name is not None:
            given, (args, kwargs) = (args, kwargs), _without_inner_dropout(func, args, kwargs)
            self.leaves_out |= args is not given[0] or kwargs is not given[1]
            if name.startswith(_RRELU):
                return self._rrelu(func, name, args, kwargs)
            if is_random(func, name) and not _is_inner(name):
                return self.draw(func, name, args, kwargs)
            if name == _CUDNN_STATE:
                self.leave_out_seed()
        result = func(*args, **kwargs)
        self._precision.look(result)
        return result

    def leave_out_seed(self) -> None:
        """Forget the previous draw if it seeds cuDNN's dropout state.

        cuDNN creates this state once per process, and only dropout inside its kernels uses it.
        """

    def _rrelu(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw the slopes of a leaky ReLU if it trains; otherwise run it unchanged.

        The in-place version runs out of place and is then copied, because `draw` still needs the input.
        """
        trains = len(args) > 4 and args[4]
        if not trains or name not in (_RRELU, f"{_RRELU}_"):
            return func(*args, **kwargs)
        result = self.draw(torch.ops.aten.rrelu_with_noise.default, _RRELU, args, kwargs)
        return args[0].copy_(result) if name.endswith("_") else result

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result for the random operator."""
        raise NotImplementedError


class RecordDraws(_Draws):
    """Records every random draw, in order.

    Attributes:
        draws: The recorded draws, on the host.
    """

    def __init__(self, precision: WatchPrecision, *, covers_backward: bool = True) -> None:
        super().__init__(precision, covers_backward=covers_backward)
        self.draws: list[Draw] = []

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw, and record the draw."""
        result = func(*args, **kwargs)
        drawn = _drawn(name, result, args)
        self.draws.append(
            Draw(name, drawn.detach().to("cpu", copy=True) if isinstance(drawn, Tensor) else torch.empty(0))
        )
        return result

    def leave_out_seed(self) -> None:
        """Forget the previous draw if it is a seed for cuDNN."""
        if self.draws and self.draws[-1].name == "random_":
            self.draws.pop()

    @property
    def has_drawn(self) -> bool:
        """Whether the run drew random numbers, or would have drawn them inside a kernel."""
        return bool(self.draws) or self.leaves_out


class NoDraws:
    """Detects whether a step draws random numbers, by the states of generators before and after.

    The runner puts dropout layers into eval mode for it. It costs nothing; a mode that sees every operator costs as much as a small step.

    Args:
        generators: Returns the states of the generators that the step may use.

    Attributes:
        has_drawn: Whether the step drew random numbers.
        covers_backward: False: the backward pass only repeats draws of the forward pass.
    """

    covers_backward = False

    def __init__(self, generators: Callable[[], Any]) -> None:
        self._generators, self.has_drawn = generators, False

    def __enter__(self) -> Self:
        self._before = self._generators()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_drawn |= not _same_states(self._before, self._generators())


def _same_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(state, other[name]) for name, state in one.items() if isinstance(state, Tensor))


DrawMode = _Draws | NoDraws


class ReplayDraws(_Draws):
    """Replays recorded draws: a micro-batch gets the entries of its rows.

    Args:
        draws: The draws of the run over all rows.
        rows: The number of all rows.
        start: The first row of the micro-batch.
        stop: The row after the last row of the micro-batch.
        order: The order of rows in draws with k entries per row.
        precision: Records the formats of operators' results.
        covers_backward: Whether the backward pass runs in the mode too.

    Attributes:
        troubles: The reasons why the replay is invalid; empty while it is valid.
        is_ordered: Whether a draw had k > 1 entries per row, so that `order` mattered.
    """

    def __init__(
        self,
        draws: Sequence[Draw],
        *,
        rows: int,
        start: int,
        stop: int,
        order: Order,
        precision: WatchPrecision,
        covers_backward: bool = True,
    ) -> None:
        super().__init__(precision, covers_backward=covers_backward)
        self._draws, self._next = draws, 0
        self._rows, self._start, self._stop, self._order = rows, start, stop, order
        self.troubles: list[str] = []
        self.is_ordered = False

    def finish(self) -> None:
        """Add a trouble if the micro-batch has drawn fewer times than the whole run."""
        if self._next < len(self._draws) and not self.troubles:
            self.troubles.append("fewer random draws for fewer rows")

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw, and overwrite the draw with the recorded entries of the rows."""
        result = func(*args, **kwargs)
        index, self._next = self._next, self._next + 1
        known = self._draws[index] if index < len(self._draws) else None
        drawn = _drawn(name, result, args)
        if known is None or known.name != name or not isinstance(drawn, Tensor):
            self.troubles.append(f"another random draw ({name})")
            return result
        placed = self._placed(known.value, tuple(drawn.shape), permutes=name in _PERMUTES)
        if placed is None:
            self.troubles.append(f"{name} has no entries of its own for each row")
            return result
        return _with_draw(name, result, placed.to(drawn.device), args)

    def _placed(self, whole: Tensor, shape: tuple[int, ...], *, permutes: bool) -> Tensor | None:
        if tuple(whole.shape) == shape:
            return whole
        if permutes or whole.dim() != len(shape):
            return None
        differ = [dim for dim in range(len(shape)) if whole.shape[dim] != shape[dim]]
        if len(differ) != 1:
            return None
        dim, size = differ[0], self._stop - self._start
        times, rest = divmod(whole.shape[dim], self._rows)
        if rest or shape[dim] != times * size:
            return None
        if times == 1:
            return whole.narrow(dim, self._start, size)
        self.is_ordered = True
        if self._order == "interleaved":
            return whole.narrow(dim, times * self._start, times * size)
        return whole.unflatten(dim, (times, self._rows)).narrow(dim + 1, self._start, size).flatten(dim, dim + 1)


class ConstantDraws(_Draws):
    """Makes random operators return constants, the same for each row: a step without noise.

    | draw | constant |
    |---|---|
    | uniform | the middle of the range |
    | normal | half a standard deviation above the mean |
    | dropout | all entries are kept |
    | integers | the lowest one |
    | permutation | each entry moves by one place |

    A step that mixes rows by a permutation thus still mixes rows.
    """

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and overwrite its draw with the constant."""
        result = func(*args, **kwargs)
        drawn = _drawn(name, result, args)
        if not isinstance(drawn, Tensor):
            return result
        return _with_draw(name, result, _constant(name, func, drawn, args, kwargs), args)


@cache
def _name_of_drawing(func: Any) -> str | None:
    """Return the name of an operator that may draw; None for all other operators.

    The operator may draw inside its kernel.
    """
    name = func._schema.name.split("::")[1]
    return name if is_random(func, name) or _is_inner(name) or name.startswith(_RRELU) or "_rnn" in name else None


def is_random(func: Any, name: str) -> bool:
    """Return whether an operator draws from a generator."""
    return _SEEDED in func.tags or name in _UNTAGGED


def _is_inner(name: str) -> bool:
    """Return whether an operator draws inside a larger kernel: attention, recurrent layers."""
    return "attention" in name or name.endswith("_rnn") or name == _CUDNN_STATE


def _without_inner_dropout(
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


def _drawn(name: str, result: Any, args: Sequence[Any]) -> Any:
    """Return the draw of a random operator.

    It is the operator's result, the mask that it also returns, or an argument that it wrote.
    """
    if name == _RRELU:
        return args[1]
    return result[1] if name in ("native_dropout", "_fused_dropout") else result


def _with_draw(name: str, result: Any, value: Tensor, args: Sequence[Any]) -> Any:
    """Return the operator's result for the draw `value`.

    Only dropout returns new tensors; other operators' results are overwritten.
    """
    if name in ("native_dropout", "_fused_dropout"):
        kept = args[1] if name == "_fused_dropout" else 1.0 - args[1]
        mask = value.to(result[1].dtype)
        return args[0] * mask / kept if kept else torch.zeros_like(args[0]), mask
    if name == _RRELU:
        args[1].copy_(value)
        value = args[0] * args[1]
    result.copy_(value)
    return result


def _constant(name: str, func: Any, drawn: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    base = name.rstrip("_").removesuffix("_like")
    like = torch.empty_like(drawn)
    if base == _RRELU:
        low, high = (
            _argument(func, args, kwargs, (which,), value) for which, value in (("lower", 1 / 8), ("upper", 1 / 3))
        )
        return like.fill_(1.0).masked_fill_(args[0] <= 0, (low + high) / 2)
    if base in _PERMUTES or base in _INDICES:
        places = torch.arange(drawn.shape[-1], device=drawn.device).to(drawn.dtype).expand_as(drawn)
        return places.roll(1, -1) if base in _PERMUTES else places
    if base in ("randint", "random"):
        return like.fill_(_argument(func, args, kwargs, ("low", "from"), 0.0))
    if base == "uniform":
        low, high = (_argument(func, args, kwargs, names, value) for names, value in ((("from",), 0.0), (("to",), 1.0)))
        return like.fill_((low + high) / 2)
    if base == "normal":
        mean, deviation = (
            _argument(func, args, kwargs, (which,), value) for which, value in (("mean", 0.0), ("std", 1.0))
        )
        return like.fill_(mean + 0.5 * deviation)
    return like.fill_({"rand": 0.5, "randn": 0.5}.get(base, 1.0))


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], default: float) -> float:
    """Return a numeric argument of an operator by name.

    Return `default` if the argument is a tensor, None or missing.
    """
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            value = kwargs.get(argument.name, args[index] if index < len(args) else default)
            return default if value is None or isinstance(value, Tensor) else float(value)
    return default
