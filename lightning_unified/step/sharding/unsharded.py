"""The view of a sharded module as it was before `fully_shard`, for copies of it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._mode_utils import no_dispatch

__all__ = ["seen_unsharded"]

_FSDP = "torch.distributed.fsdp."
_STATES = "__composable_api"  # prefix of the attributes in which `fully_shard` keeps its state (torch 2.13)
_ABSENT = object()


@contextmanager
def seen_unsharded(module: nn.Module) -> Iterator[None]:
    """Give a sharded module its original classes, hooks and whole parameters inside the block.

    `fully_shard` forbids to copy a module. Inside the block each parameter is a whole one on the meta device, without memory. Parameters
    that modules share stay shared. No forward pass may run meanwhile. The module is the same object, and as before after the block.
    """
    whole: dict[int, nn.Parameter] = {}
    with ExitStack() as stack:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                stack.callback(setattr, child, "__class__", type(child))
                child.__class__ = type(child).__mro__[2]  # pyright: ignore[reportAttributeAccessIssue]  # FSDP…, FSDPModule, the original
            for name, hidden in _hidden(vars(child)).items():
                _replace(stack, vars(child), name, hidden)
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    if id(parameter) not in whole:
                        whole[id(parameter)] = _stand_in(parameter)
                    _replace(stack, child._parameters, name, whole[id(parameter)])
        yield


def _hidden(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that FSDP2 has changed, with their values before."""
    found: dict[str, Any] = {name: _ABSENT for name in attributes if name.startswith(_STATES)}
    for name, hooks in attributes.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            own = {key: hook for key, hook in hooks.items() if not _is_of_fsdp(hook)}
            if len(own) < len(hooks):
                found[name] = type(hooks)(own)
    if attributes.get("_device_mesh") is not None:
        found["_device_mesh"] = None  # its process groups cannot be copied
    return found


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)


def _replace(stack: ExitStack, entries: dict[str, Any], name: str, value: Any) -> None:
    """Replace an entry of a dictionary, or leave it out, until `stack` is closed."""
    stack.callback(partial(entries.__setitem__, name, entries[name]))
    if value is _ABSENT:
        del entries[name]
    else:
        entries[name] = value


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter like `parameter` on the meta device, of its global shape."""
    with no_dispatch():  # a real tensor, even in fake-tensor mode
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        found = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(found).update({name: value for name, value in vars(parameter).items() if name != "_is_param"})  # torch's own
    return found
