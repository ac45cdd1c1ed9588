"""Check whether a call can be recorded as a CUDA graph, without a trial recording.

A graph repeats kernel launches. Decisions by value, waits for the device, copies from the host and hooks would happen once, at
the recording. Or they would end the recording with an error that leaves torch's CUDA generator unusable (torch 2.11 to 2.13).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_unified.nn.autograd_limits import in_a_transform
from lightning_unified.nn.compiled import COMPILED_CALL, ORIGINAL, compiled_inside, is_compiled
from lightning_unified.nn.cuda_graphs.calls import Call
from lightning_unified.nn.recomputing import recomputes_by_itself
from lightning_unified.nn.second_run.runs import recomputed_calls, saves_elsewhere

__all__ = ["FirstCall", "Looking", "look", "must_run_eagerly", "reads_outside", "state_of", "why_not"]

_PLAIN = (nn.Parameter, Tensor)
_SETTINGS = frozenset((bool, int, float, complex, str))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def state_of(network: nn.Module) -> tuple[Any, ...]:
    """Return the state of `network` that a recording assumes.

    It consists of tensor addresses, trained parameters, modes, hooks, replaced forwards, and of numbers and texts that are attributes of the
    modules, because a recording holds the values that Python code has read.

    It runs at every call, so it is a plain walk: a fifth of a millisecond for a hundred modules.
    """
    found: list[Any] = []
    stack = [network]
    while stack:
        module = stack.pop()
        own = module.__dict__
        hooked = (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
        compiled = None if module is network else own.get(COMPILED_CALL)
        found += (own.get("forward"), bool(hooked), compiled)
        found += [value for value in own.values() if type(value) in _SETTINGS]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                found += (tensor.data_ptr() if type(tensor) in _PLAIN else id(tensor), tensor.requires_grad)
        stack.extend(child for child in module._modules.values() if child is not None)
    return tuple(found)


def why_not(network: nn.Module) -> str | None:
    """Return the reason that prevents recording `network` in its present state, or None."""
    if not any(one.requires_grad for one in network.parameters()):
        return "none of its parameters is trained"
    for name, module in network.named_modules():
        where = f"{name or 'it'} ({type(module).__name__})"
        if recomputes_by_itself(module):
            return f"{where} recomputes its activations, which reads the state of the random generator"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{where} has hooks, which would run at the recording and never again"
        if not is_compiled(module) and any(hasattr(value, ORIGINAL) for value in vars(module).values()):
            return f"{where} calls a function that torch.compile returned"
        if getattr(module, "sparse", False) is True:
            return f"{where} has sparse gradients"
        if any(
            one is not None and one.requires_grad and type(one) is not nn.Parameter
            for one in module._parameters.values()
        ):
            return f"{where} has trained parameters of a class of their own"
    return None


def must_run_eagerly(network: nn.Module) -> bool:
    """Return whether modes, hooks or contexts around a call of `network` forbid a replay."""
    return bool(
        not (network.training and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or in_a_transform()
        or saves_elsewhere()
        or torch.is_anomaly_enabled()  # looks at values in the backward pass
        or _has_any_global_hook()
        or torch.cuda.is_current_stream_capturing()
    )


class Looking(TorchDispatchMode):
    """Dispatch mode that checks each operation of a forward pass for reasons not to record it.

    Some modules skip a check of values while the stream is being recorded (transformers' masks). This mode reports a recording to
    them, so that the same operations run as in a recording.

    Args:
        device: The device on which the whole forward pass must run.

    Attributes:
        reason: Why the pass cannot be recorded; None without a reason.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.reason: str | None = None
        self._device = device
        self._asked = torch.cuda.is_current_stream_capturing

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        torch.cuda.is_current_stream_capturing = lambda: True
        return self

    @override
    def __exit__(self, *details: object) -> None:
        torch.cuda.is_current_stream_capturing = self._asked
        super().__exit__(*details)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.reason = self.reason or self._against(func, args, kwargs)
        return func(*args, **kwargs)

    def _against(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if isinstance(func, HigherOrderOperator):
            return f"{func.name()} calls functions of its own"
        name = str(func).removesuffix(".default")
        if "c10d" in func.namespace:
            return f"{name} communicates with other processes"
        if saves_elsewhere():
            return "tensors saved for the backward pass are recomputed, moved or packed"
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        goes_to = kwargs.get("device")
        if any(one.device != self._device for one in tensors) or (
            goes_to is not None and tensors and torch.device(goes_to).type != self._device.type
        ):
            return f"{name} reads or writes outside {self._device}"
        is_index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        if is_index:
            masks = any(one.dtype in (torch.bool, torch.uint8) for one in _tensors_of(args[1]))
            return f"{name} takes a mask, whose values decide a shape" if masks else None
        if any(tag in func.tags for tag in _BY_VALUE):
            return f"{name} waits for values of the device"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstCall:
    """Findings of an eager call of a new shape.

    Attributes:
        result: The network's result.
        reason: Why the call cannot be recorded; None without a reason.
        written: Arguments and buffers that the forward pass wrote, by id.
    """

    result: Any
    reason: str | None
    written: dict[int, Tensor]


def look(
    network: nn.Module, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], *, state: tuple[Any, ...] | None
) -> FirstCall:
    """Run `network` eagerly, and check whether the call can be recorded.

    Args:
        network: In train mode.
        call: The call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        state: `state_of(network)` before the call.
    """
    watched = {id(one): (one, one._version) for one in (*call.tensors, *network.buffers())}
    device = call.tensors[0].device
    drawn, recomputed, by_python = _drawn(device), recomputed_calls(), _drawn_by_python()
    with Looking(device) as looking, _unseen(network, looking):
        result = network._call_impl(*args, **kwargs)
    written = {key: one for key, (one, version) in watched.items() if one._version != version}
    reason = looking.reason or _why_not_result(network, result, call, written, state=state)
    if reason is None and by_python != _drawn_by_python():
        reason = "it draws from Python's or NumPy's random generator, which a recording would do once"
    if reason is None and drawn != _drawn(device) and recomputed != recomputed_calls():
        reason = "it draws random numbers, and blocks of it recompute their activations"
    return FirstCall(result=result, reason=reason, written=written)


def _drawn_by_python() -> tuple[Any, ...]:
    """Return a value that changes when the random generators of Python or NumPy draw."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, keys.tobytes(), *rest  # pyright: ignore[reportAttributeAccessIssue]


def _drawn(device: torch.device) -> Any:
    """Return a value that changes when the device's random generator draws."""
    if device.type != "cuda":
        return torch.get_rng_state().numpy().tobytes()
    generator = torch.cuda.default_generators[torch.device(device).index or 0]
    return generator.initial_seed(), generator.get_offset()


@contextmanager
def _unseen(network: nn.Module, looking: Looking) -> Iterator[None]:
    """Hide operations of compiled parts from `looking` inside the block.

    Torch's compiler does not run under dispatch modes, and eager operations would need more memory.
    """
    before = [(part, vars(part).get(COMPILED_CALL)) for part in compiled_inside(network).values()]
    for part, call in before:
        vars(part)[COMPILED_CALL] = _Unseen(call or part._call_impl, looking)
    try:
        yield
    finally:
        for part, call in before:
            if call is None:
                del vars(part)[COMPILED_CALL]
            else:
                vars(part)[COMPILED_CALL] = call


class _Unseen:
    """A call whose operations `looking` does not see while it is the innermost dispatch mode.

    A checkpointed block keeps this call for its second run, when `looking` is over.
    """

    def __init__(self, call: Callable[..., Any], looking: Looking) -> None:
        self._call, self._looking = call, looking

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _get_current_dispatch_mode() is not self._looking:
            return self._call(*args, **kwargs)
        with _pop_mode_temporarily():
            return self._call(*args, **kwargs)


def _why_not_result(
    network: nn.Module, result: Any, call: Call, written: dict[int, Tensor], *, state: tuple[Any, ...] | None
) -> str | None:
    leaves = tree_leaves(result)
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(type(leaf) not in (Tensor, type(None)) for leaf in leaves):
        return "it returns something other than tensors and None"
    if not any(one.requires_grad for one in outputs):
        return "none of its outputs requires a gradient"
    if any(id(one) in written for one in call.tensors):
        return "it writes into its arguments"
    if state_of(network) != state:
        return "it replaces tensors, or changes numbers or texts, of its own when it is called"
    return reads_outside(outputs, inputs=call.tensors, parameters=[*network.parameters()])


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    return (one for one in values if isinstance(one, Tensor))


def reads_outside(outputs: Sequence[Tensor], *, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> str | None:
    """Return, in words, a tensor outside inputs and parameters on which the outputs depend.

    The result is None without such a tensor. A recording would silently leave out its gradient. The older form of torch's
    checkpointing, which cannot be recorded, is found here too.

    Args:
        outputs: The outputs of an eager call, with their autograd graph.
        inputs: The call's inputs.
        parameters: The network's parameters.
    """
    known = {id(one) for one in (*inputs, *parameters)}
    seen = {one.grad_fn for one in inputs if one.grad_fn is not None}
    stack = [one.grad_fn for one in outputs if one.grad_fn is not None and one.grad_fn not in seen]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            return "it recomputes activations (torch.utils.checkpoint with use_reentrant=True)"
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            return f"it uses a trained tensor of shape {tuple(variable.shape)} that is no parameter of its own"
        stack.extend(below for below, _ in node.next_functions if below is not None)
    return None
