"""A module's submodules, parameters and buffers, from one quick walk.

`nn.Module.modules()` and `parameters()` put the names of thousands of modules together, which takes most of their time. A dry run walks
through its module at each step.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.nn import Module

__all__ = ["modules_of", "named_modules_of", "tensors_of"]


def named_modules_of(module: Module) -> dict[str, Module]:
    """Return `module` and its submodules by name, in the order of `module.named_modules()`."""
    found: dict[str, Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Module | None]] = [("", module)]
    while waiting:
        name, one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        found[name] = one
        if one._modules:  # most modules have none
            prefix = f"{name}." if name else ""
            waiting.extend([(prefix + child, inner) for child, inner in reversed(one._modules.items())])
    return found if _walk_alike(found.values()) else dict(module.named_modules())


def modules_of(module: Module) -> list[Module]:
    """Return `module` and its submodules, in the order of `module.modules()`."""
    found: dict[int, Module] = {}
    waiting: list[Module | None] = [module]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        if one._modules:
            waiting.extend(reversed(one._modules.values()))
    return list(found.values()) if _walk_alike(found.values()) else list(module.modules())


def _walk_alike(modules: Iterable[Module]) -> bool:
    """Return whether no module has a walk of its own."""
    kinds = set(map(type, modules))
    usual = Module.modules, Module.named_modules
    return all((kind.modules, kind.named_modules) == usual for kind in kinds)


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
