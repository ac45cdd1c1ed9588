"""Let output heads return lazy logits in training."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.nn.autograd_limits import in_a_transform
from lightning_unified.nn.lazy_logits.find import PLAIN, TiedHead, obstacles, output_heads, tied_heads
from lightning_unified.nn.lazy_logits.source import HeadCall, Source
from lightning_unified.nn.lazy_logits.states import hidden_states
from lightning_unified.nn.lazy_logits.tensor import LazyLogits, View, lazy
from lightning_unified.nn.stand_in import FORWARD, StandIn, warn_once

__all__ = ["LazyHeads", "autocast_dtype", "lazy_output", "rows_of"]

_PLAIN_TENSORS = (Tensor, FakeTensor)


def rows_of(module: nn.Module) -> int | None:
    """Return the rows of a chunk of lazy logits; None if no output head returns them."""
    modules = [*output_heads(module).values(), *(head.source for head in tied_heads(module).values())]
    forwards = [vars(one).get(FORWARD) for one in modules]
    return next((forward.rows for forward in forwards if isinstance(forward, (_StandIn, _TiedStandIn))), None)


class LazyHeads:
    """Let the output heads of a module return lazy logits in training, until `remove`.

    A head's `forward` is replaced on the object. Its class, parameters, hooks and state-dict keys stay. A copy made with
    `copy.deepcopy`, `pickle` or `torch.save` has the original forward. Without gradients, and in compiled code, a head computes its
    logits. A head without a layer of its own is the module whose output is multiplied with an embedding table.

    Args:
        module: A module with output heads, as `output_heads` and `tied_heads` find them.
        rows: Rows of logits that the loss computes at one time.

    Attributes:
        names: The names of the heads.
        refused: Why other heads stay as they are, by name.
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        said: set[str] = set()
        self.refused = obstacles(module)
        heads = {name: head for name, head in output_heads(module).items() if name not in self.refused}
        tied = {name: head for name, head in tied_heads(module).items() if name not in self.refused}
        self.names = (*heads, *(f"the tied weights after {name}" for name in tied))
        for name, why in self.refused.items():
            warn_once(said, f"{name} stays as it is, because {why}. {PLAIN}")
        alive: weakref.WeakSet[Source] = weakref.WeakSet()
        self._stand_ins: list[StandIn] = [
            *(_StandIn(name, head, rows, said=said, alive=alive) for name, head in heads.items()),
            *(_TiedStandIn(head, rows, said=said, alive=alive) for head in tied.values()),
        ]
        for stand_in in self._stand_ins:
            stand_in.install()
        self._hook = register_optimizer_step_pre_hook(_Settling(alive)) if self.names else None

    def remove(self) -> None:
        """Restore the heads' `forward`; a second call does nothing."""
        for stand_in in self._stand_ins:
            stand_in.remove()
        if self._hook is not None:
            self._hook.remove()
        self._stand_ins, self._hook = [], None


class _Settling:
    """Computes logits that someone still holds when an optimizer is about to change weights."""

    def __init__(self, alive: "weakref.WeakSet[Source]") -> None:
        self._alive = alive

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._settle()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # `args` begins with the optimizer
        if closure is None:
            return None

        def settled() -> Any:
            result = closure()
            self._settle()
            return result

        if len(args) > 1:
            return (args[0], settled, *args[2:]), kwargs
        return args, {**kwargs, "closure": settled}

    def _settle(self) -> None:
        _settle(self._alive)


def _settle(alive: "weakref.WeakSet[Source]", *_: Any) -> None:
    """Compute the logits that someone still holds."""
    for source in list(alive):
        source.settle()


class _StandIn(StandIn):
    """Replacement of one head's `forward`."""

    def __init__(
        self, name: str, head: nn.Module, rows: int, *, said: set[str], alive: "weakref.WeakSet[Source]"
    ) -> None:
        super().__init__(head, FORWARD)
        self._name, self.rows, self._said, self._alive = name, rows, said, alive
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in head.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not self.is_on or torch.compiler.is_compiling() or not self._trains(hidden):
            return self.function(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        if why := self._reason_against(hidden):
            warn_once(self._said, f"{self._name} runs as it is, because {why}. {PLAIN}")
            return self.function(hidden)
        dtype = autocast_dtype(hidden.device.type)
        call = HeadCall(self.module, self.function, self.rows, dtype, self._said, self._alive)
        if self._is_sharded and hidden.requires_grad:  # the weights are whole until the backward pass has ended
            hidden.register_hook(partial(_settle, self._alive))
        return lazy_output(call, hidden, is_tracked=True)

    def _trains(self, hidden: Any) -> bool:
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or not torch.is_grad_enabled() or hidden.is_inference():
            return False
        if in_a_transform():
            return False  # of `torch.func`, which takes no wrapper subclass
        return hidden.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())

    def _reason_against(self, hidden: Tensor) -> str:
        """Return why this call must compute its logits; empty if nothing is against lazy ones."""
        if is_traceable_wrapper_subclass(hidden):
            return f"its input is a {type(hidden).__name__}"
        if any(is_traceable_wrapper_subclass(parameter) for parameter in self.module.parameters()):
            return "its weights are a tensor subclass"
        for child in self.module.modules():
            if any(not isinstance(one, (nn.Parameter, type(None))) for one in child._parameters.values()):
                return "torch.func.functional_call gives it other weights, for this call only"
            if child._backward_hooks or child._backward_pre_hooks:
                return "it has backward hooks, which need its output"
            if (
                child is not self.module
                and type(child).__name__.startswith("Dropout")
                and child.training
                and getattr(child, "p", 0)
            ):
                return "dropout inside it draws noise, which chunks would draw anew"
        return ""


class _TiedStandIn(StandIn):
    """Replacement of the forward of a module whose output is multiplied with an embedding table."""

    def __init__(self, head: TiedHead, rows: int, *, said: set[str], alive: "weakref.WeakSet[Source]") -> None:
        super().__init__(head.source, FORWARD)
        self._head, self.rows, self._said, self._alive = head, rows, said, alive

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        if not self.is_on or torch.compiler.is_compiling() or type(result) not in _PLAIN_TENSORS or in_a_transform():
            return result
        if result.dim() < 2 or not torch.is_grad_enabled() or not result.requires_grad:
            return result
        return hidden_states(result, self._product)

    def _product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return lazy logits for a product with one of the tables; None for another product."""
        is_table = any(weight is one for one in self._head.weights)
        if not self.is_on or not is_table or not isinstance(bias, (nn.Parameter, type(None))):
            return None
        if not isinstance(weight, nn.Parameter):
            return None  # of `torch.func.functional_call`, for this call only
        dtype = autocast_dtype(hidden.device.type)
        if not torch.is_grad_enabled() or hidden.dim() < 2 or (dtype is None and hidden.dtype != weight.dtype):
            return None
        head = _TiedLinear(weight, bias)
        return lazy_output(
            HeadCall(head, head.forward, self.rows, dtype, self._said, self._alive), hidden, is_tracked=True
        )


class _TiedLinear(nn.Linear):
    """A linear layer over parameters of other modules."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("weight", weight)  # pyright: ignore[reportArgumentType]
        self.register_parameter("bias", bias)  # pyright: ignore[reportArgumentType]


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of devices; None where it is off."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def lazy_output(call: HeadCall, hidden: Tensor, *, is_tracked: bool) -> LazyLogits:
    """Return the lazy logits of a call of a head."""
    classes, dtype = _result(call, hidden)
    shape = (*hidden.shape[:-1], classes)
    return lazy(View(Source(call, hidden, (), shape), hidden, shape, len(shape) - 1, (), is_tracked), dtype)


def _result(call: HeadCall, hidden: Tensor) -> tuple[int, torch.dtype]:
    """Return the number of classes and the dtype of the logits."""
    if call.is_linear:
        head: Any = call.head
        low = call.autocast if hidden.dtype != torch.float64 else None  # autocast leaves float64 as it is
        return head.out_features, low or hidden.dtype
    with torch.no_grad():
        none = call(hidden.new_empty(0, hidden.shape[-1]), caches=False)
    return none.shape[-1], none.dtype
