"""Find a model's output heads, and let them return lazy logits in training."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.nn.lazy_logits.source import HeadCall, Source
from lightning_unified.nn.lazy_logits.tensor import LazyLogits, View, lazy
from lightning_unified.nn.stand_in import FORWARD, StandIn, warn_once

__all__ = ["LazyHeads", "autocast_dtype", "lazy_output", "obstacles", "output_heads", "rows_of"]

_SAID: set[str] = set()  # of this process: a plan asks for the heads many times
_PLAIN = "Its logits are computed at once, as without memory.loss_chunk."


def output_heads(module: nn.Module) -> dict[str, nn.Module]:
    """Return the output heads of the Hugging Face models in `module`, by name.

    A model has one if its class has `loss_function`, and `get_output_embeddings()` returns a submodule.
    """
    names = {id(child): name for name, child in module.named_modules()}
    found: dict[str, nn.Module] = {}
    for child in module.modules():
        kind = type(child)
        if not hasattr(kind, "get_output_embeddings") or not hasattr(kind, "loss_function"):
            continue
        try:
            head = child.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        except (AttributeError, NotImplementedError):  # transformers' answer of a model without a head
            continue
        except Exception as error:  # the user's own method: the model trains without lazy logits
            warn_once(
                _SAID, f"{kind.__name__}.get_output_embeddings() raised {type(error).__name__}: {error}. {_PLAIN}"
            )
            continue
        if isinstance(head, nn.Module) and id(head) in names:
            found[names[id(head)]] = head
    return found


def obstacles(module: nn.Module) -> dict[str, str]:
    """Return the output heads of `module` that cannot return lazy logits, with the reasons."""
    compiled, sharded = _compiled(module), _sharded(module)
    found = {name: _obstacle(name, head, compiled, sharded) for name, head in output_heads(module).items()}
    return {name: why for name, why in found.items() if why}


def rows_of(module: nn.Module) -> int | None:
    """Return the rows of a chunk of lazy logits; None if no output head returns them."""
    forwards = [vars(head).get(FORWARD) for head in output_heads(module).values()]
    return next((forward.rows for forward in forwards if isinstance(forward, _StandIn)), None)


class LazyHeads:
    """Let the output heads of a module return lazy logits in training, until `remove`.

    A head's `forward` is replaced on the object. Its class, parameters, hooks and state-dict keys stay. A copy made with
    `copy.deepcopy`, `pickle` or `torch.save` has the original forward. Without gradients, and in compiled code, a head computes its
    logits.

    Args:
        module: A module that holds models with output heads.
        rows: Rows of logits that the loss computes at one time.

    Attributes:
        names: The names of the heads.
        refused: Why other heads stay as they are, by name.
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        said: set[str] = set()
        self.refused = obstacles(module)
        heads = {name: head for name, head in output_heads(module).items() if name not in self.refused}
        self.names = tuple(heads)
        for name, why in self.refused.items():
            warn_once(said, f"{name} stays as it is, because {why}. {_PLAIN}")
        alive: weakref.WeakSet[Source] = weakref.WeakSet()
        self._stand_ins = [_StandIn(name, head, rows, said=said, alive=alive) for name, head in heads.items()]
        for stand_in in self._stand_ins:
            stand_in.install()
        self._hook = register_optimizer_step_pre_hook(_Settling(alive)) if heads else None

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
            warn_once(self._said, f"{self._name} runs as it is, because {why}. {_PLAIN}")
            return self.function(hidden)
        dtype = autocast_dtype(hidden.device.type)
        call = HeadCall(self.module, self.function, self.rows, dtype, self._said, self._alive)
        if self._is_sharded and hidden.requires_grad:  # the weights are whole until the backward pass has ended
            hidden.register_hook(partial(_settle, self._alive))
        return lazy_output(call, hidden, is_tracked=True)

    def _trains(self, hidden: Any) -> bool:
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or not torch.is_grad_enabled() or hidden.is_inference():
            return False
        return hidden.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())

    def _reason_against(self, hidden: Tensor) -> str:
        """Return why this call must compute its logits; empty if nothing is against lazy ones."""
        if is_traceable_wrapper_subclass(hidden):
            return f"its input is a {type(hidden).__name__}"
        if any(is_traceable_wrapper_subclass(parameter) for parameter in self.module.parameters()):
            return "its weights are a tensor subclass"
        for child in self.module.modules():
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


def _obstacle(name: str, head: nn.Module, compiled: dict[str, str], sharded: dict[str, str]) -> str:
    """Return why a head cannot return lazy logits; empty if it can."""
    for outer, kind in compiled.items():
        if _is_in(name, outer):
            return f"{kind} is compiled"
    for outer, kind in sharded.items():
        if outer and _is_in(name, outer):
            return f"FSDP2 gathers {kind} for its own forward only"
    own = vars(head).get(FORWARD)
    if own is not None and not isinstance(own, _StandIn) and getattr(own, "__func__", None) is not type(head).forward:
        return "its forward was replaced on the object"
    if not isinstance(head, nn.Linear) and not type(head).__module__.startswith("peft."):
        return f"{type(head).__name__} is not known to treat each position by itself"
    if any(
        is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)
        for parameter in head.parameters()
    ):
        return "its weights are a tensor subclass"
    return ""  # FSDP2 replaces its parameters, which are a DTensor, by whole ones before the step


def _is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _sharded(module: nn.Module) -> dict[str, str]:
    """Return the classes of submodules that FSDP2 gathers, by name."""
    return {name: type(child).__name__ for name, child in module.named_modules() if isinstance(child, FSDPModule)}


def _compiled(module: nn.Module) -> dict[str, str]:
    """Return the classes of compiled submodules, by name."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None:
            found[name] = type(getattr(child, "_orig_mod", child)).__name__
    return found


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
