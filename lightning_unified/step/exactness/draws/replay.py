"""Record the random draws of a whole run, and replay each micro-batch's share of them.

A module with dropout or noise draws different numbers when its rows run in micro-batches, so its gradients cannot be compared.
`RecordDraws` records the result of every random operator while all rows run together. `ReplayDraws` runs the operators again on a
micro-batch, and overwrites their results with the entries of its rows. The gradients of a module with dropout or noise then agree up to
rounding.

`ReplayDraws` finds the entries of a micro-batch in a recorded draw by shape:

1. The draw has the same shape in the micro-batch: it does not depend on the rows, and is used unchanged.
2. One dimension is k times the number of rows, in both runs: the draw is sliced by rows. With k > 1 there are two orders, and
   the check tries both: `"interleaved"` (row 0 k times, row 1 k times, …) and `"blocks"` (all rows, k times over).
3. Any other draw makes the replay invalid. This includes a permutation of the rows, which has no entries per row, and a draw from another
   distribution, such as one whose probabilities are relative to the largest loss of the rows.

Some kernels draw inside, such as fused attention and cuDNN's recurrent layers. They run without dropout in both modes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.step.exactness.draws.operators import (
    CUDNN_STATE,
    PERMUTES,
    RRELU,
    drawn_by,
    is_inner,
    is_random,
    name_of_drawing,
    parameters_of,
    with_draw,
    without_inner_dropout,
)
from lightning_unified.step.results.sameness import same

__all__ = ["Draw", "DrawMode", "InterceptDraws", "NoDraws", "Order", "RecordDraws", "ReplayDraws"]

Order = Literal["interleaved", "blocks"]

_LOW = (torch.float16, torch.bfloat16)
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # of a distribution's parameters; 2e-2 in 16 bits


@dataclass(frozen=True, slots=True)
class Draw:
    """The result of one random operator.

    Args:
        name: The name of the operator, without its namespace.
        value: The operator's result on the host; for `native_dropout`, the drawn mask.
        parameters: The tensors that set the distribution, on the host.
    """

    name: str
    value: Tensor
    parameters: tuple[Tensor, ...] = ()


class InterceptDraws(TorchDispatchMode):
    """Passes every random operator to `draw`; all other operators run unchanged.

    Args:
        covers_backward: Whether the backward pass runs in the mode too. There, recomputed activations draw again, and kernels that draw
            inside have backward kernels. The backward pass takes half of the mode's time.

    Attributes:
        formats: The 16-bit formats of operators' results; they decide how coarsely a run rounds.
        leaves_out: Whether a kernel that draws inside has run without its dropout.
    """

    def __init__(self, *, covers_backward: bool = True) -> None:
        super().__init__()
        self._covers_backward = covers_backward
        self.formats: set[torch.dtype] = set()
        self.leaves_out = False

    @property
    def covers_backward(self) -> bool:
        """Whether the backward pass runs in the mode; True once a kernel ran without dropout."""
        return self._covers_backward or self.leaves_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of_drawing(func)
        if name is not None:
            if (result := self._decomposed(func, name, args, kwargs)) is not NotImplemented:
                return result
            given, (args, kwargs) = (args, kwargs), without_inner_dropout(func, args, kwargs)
            self.leaves_out |= args is not given[0] or kwargs is not given[1]
            if name.startswith(RRELU):
                return self._rrelu(func, name, args, kwargs)
            if is_random(func, name) and not is_inner(name):
                return self.draw(func, name, args, kwargs)
            if name == CUDNN_STATE:
                self.leave_out_seed()
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype in _LOW:
                self.formats.add(tensor.dtype)
        return result

    def _decomposed(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that is made of others; `NotImplemented` for any other.

        The others run in the mode. Inference mode passes such operators on as they are. Dropout in eval mode and recurrent layers then
        looked like draws.
        """
        if is_inner(name):
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def restart(self) -> None:
        """Forget a run that did not come to its end."""
        self.formats.clear()
        self.leaves_out = False

    def leave_out_seed(self) -> None:
        """Forget the previous draw if it seeds cuDNN's dropout state.

        cuDNN creates this state once per process, and only dropout inside its kernels uses it.
        """

    def _rrelu(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw the slopes of a leaky ReLU if it trains; otherwise run it unchanged.

        The in-place version runs out of place and is then copied, because `draw` still needs the input.
        """
        trains = len(args) > 4 and args[4]
        if not trains or name not in (RRELU, f"{RRELU}_"):
            return func(*args, **kwargs)
        result = self.draw(torch.ops.aten.rrelu_with_noise.default, RRELU, args, kwargs)
        return args[0].copy_(result) if name.endswith("_") else result

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result for the random operator."""
        raise NotImplementedError


class RecordDraws(InterceptDraws):
    """Records every random draw, in order.

    Attributes:
        draws: The recorded draws, on the host.
    """

    def __init__(self, *, covers_backward: bool = True) -> None:
        super().__init__(covers_backward=covers_backward)
        self.draws: list[Draw] = []

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw, and record the draw."""
        parameters = tuple(map(_on_host, parameters_of(name, args)))
        result = func(*args, **kwargs)
        drawn = drawn_by(name, result, args)
        self.draws.append(Draw(name, _on_host(drawn) if isinstance(drawn, Tensor) else torch.empty(0), parameters))
        return result

    @override
    def restart(self) -> None:
        super().restart()
        self.draws.clear()

    def leave_out_seed(self) -> None:
        """Forget the previous draw if it is a seed for cuDNN."""
        if self.draws and self.draws[-1].name == "random_":
            self.draws.pop()

    @property
    def has_drawn(self) -> bool:
        """Whether the run drew random numbers, or would have drawn them inside a kernel."""
        return bool(self.draws) or self.leaves_out


class NoDraws:
    """Detects random draws of a step by the states of generators before and after.

    The runner puts dropout layers into eval mode for it. It costs nothing; a mode that sees every operator costs as much as a small step.

    Args:
        generators: Returns the states of the generators that the step may use.

    Attributes:
        has_drawn: Whether the step drew random numbers.
        covers_backward: False: the backward pass only repeats draws of the forward pass.
        formats: Empty: nobody watches the operators.
    """

    covers_backward = False
    formats: frozenset[torch.dtype] = frozenset()

    def __init__(self, generators: Callable[[], Any]) -> None:
        self._generators, self.has_drawn = generators, False

    def restart(self) -> None:
        """Forget a run that did not come to its end."""
        self.has_drawn = False

    def __enter__(self) -> Self:
        self._before = self._generators()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_drawn |= not _same_states(self._before, self._generators())


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _same_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(state, other[name]) for name, state in one.items() if isinstance(state, Tensor))


DrawMode = InterceptDraws | NoDraws


class ReplayDraws(InterceptDraws):
    """Replays recorded draws: a micro-batch gets the entries of its rows.

    Args:
        draws: The draws of the run over all rows.
        rows: The number of all rows.
        start: The first row of the micro-batch.
        stop: The row after the last row of the micro-batch.
        order: The order of rows in draws with k entries per row.
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
        covers_backward: bool = True,
    ) -> None:
        super().__init__(covers_backward=covers_backward)
        self._draws, self._next = draws, 0
        self._rows, self._start, self._stop, self._order = rows, start, stop, order
        self.troubles: list[str] = []
        self.is_ordered = False

    @override
    def restart(self) -> None:
        super().restart()
        self._next, self.is_ordered = 0, False
        self.troubles.clear()

    def finish(self) -> None:
        """Add a trouble if the micro-batch has drawn fewer times than the whole run."""
        if self._next < len(self._draws) and not self.troubles:
            self.troubles.append("fewer random draws for fewer rows")

    def draw(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Draw, and overwrite the draw with the recorded entries of the rows."""
        parameters = parameters_of(name, args)
        result = func(*args, **kwargs)
        index, self._next = self._next, self._next + 1
        known = self._draws[index] if index < len(self._draws) else None
        drawn = drawn_by(name, result, args)
        if known is None or known.name != name or not isinstance(drawn, Tensor):
            self.troubles.append(f"another random draw ({name})")
            return result
        placed = self._placed(known.value, tuple(drawn.shape), permutes=name in PERMUTES)
        if placed is None:
            self.troubles.append(f"{name} has no entries of its own for each row")
            return result
        if not all(map(self._is_share, parameters, known.parameters)):
            self.troubles.append(f"{name} draws from a distribution that depends on other rows")
            return result
        return with_draw(name, result, placed.to(drawn.device), args)

    def _is_share(self, parameter: Tensor, whole: Tensor) -> bool:
        """Return whether a distribution's parameter is that of the same rows in the whole run."""
        placed = self._placed(whole, tuple(parameter.shape), permutes=False)
        return placed is not None and same(parameter, placed, tolerance=_ROUNDING.get(parameter.dtype, 2e-2))

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
