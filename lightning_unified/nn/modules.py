"""A module's submodules, parameters and buffers, from one quick walk.

`nn.Module.modules()` and `parameters()` put the names of thousands of modules together, which takes most of their time. A dry run walks
through its module at each step.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

__all__ = ["modules_of", "named_modules_of", "tensors_of"]

_METHODS = ("modules", "named_modules")


def named_modules_of(module: Module) -> dict[str, Module]:
    """Return `module` and its submodules by name, in the order of `module.named_modules()`."""
    found: dict[str, Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Module | None]] = [("", module)]
    while waiting:
        name, one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if any(getattr(type(one), method) is not getattr(Module, method) for method in _METHODS):
            return dict(module.named_modules())
        seen.add(id(one))
        found[name] = one
        if one._modules:  # most modules have none
            prefix = f"{name}." if name else ""
            waiting.extend([(prefix + child, inner) for child, inner in reversed(one._modules.items())])
    return found


def modules_of(module: Module) -> list[Module]:
    """Return `module` and its submodules, in the order of `module.modules()`."""
    return list(named_modules_of(module).values())


def tensors_of(module: Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return what `parameters()` and `buffers()` of `module` give."""
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for one in modules_of(module):
        if one._parameters:
            parameters.update(_by_id(one._parameters))
        if one._buffers:
            buffers.update(_by_id(one._buffers))
    return list(parameters.values()), list(buffers.values())


def _by_id(tensors: Mapping[str, Tensor | None]) -> dict[int, Tensor]:
    return {id(one): one for one in tensors.values() if one is not None}
