"""Choose the modules whose parameters are gathered together, and shard a module over a mesh."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.step.sharding.iteration import groups_of
from lightning_unified.step.sharding.kept_shards import refusal_of_hook

__all__ = [
    "Wrapping",
    "is_sharded",
    "keeping_attributes",
    "known_wrapping",
    "materialize",
    "note_wrapping",
    "shard",
    "sharded_roots",
    "wrapping_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """The modules whose parameters are gathered together.

    Attributes:
        blocks: Names of the modules that are groups of their own, in the module's order. All other parameters form the
            root's group, which stays gathered from the forward pass to the end of the backward pass.
        reason: How the blocks were chosen, as a phrase.
    """

    blocks: tuple[str, ...]
    reason: str


_known: WeakKeyDictionary[nn.Module, Wrapping] = WeakKeyDictionary()


def wrapping_of(module: nn.Module) -> Wrapping:
    """Return how `module` is wrapped: its repeated blocks one by one, everything else in the root's group.

    The blocks are those of activation checkpointing (`nn.blocks.find_blocks`). A block that shares a parameter with a
    module outside of it joins the root's group, because a shared parameter must be in one group. Reads names, shapes and
    identities only, so that parameters may be on the meta device or fake.
    """
    try:
        blocks = find_blocks(module)
    except ValueError as error:
        return Wrapping(blocks=(), reason=f"one group of all parameters: {error}")
    uses = Counter(id(parameter) for parameter in _owned(module))
    tied: list[str] = []
    chosen: list[str] = []
    for name, block in blocks.modules.items():
        own = Counter(id(parameter) for parameter in _owned(block))
        (chosen if all(uses[key] == count for key, count in own.items()) else tied).append(name)
    reason = str(blocks) if chosen else "one group of all parameters"
    if tied:
        reason += f"; {', '.join(tied)} in the root's group, for parameters shared with other modules"
    return Wrapping(blocks=tuple(chosen), reason=reason)


def shard(
    module: nn.Module, mesh: DeviceMesh, wrapping: Wrapping | None = None, *, reshard_after_forward: bool | None = None
) -> Wrapping:
    """Shard the parameters of `module` over `mesh` in place, and return the wrapping.

    Parameters become DTensors that hold this rank's rows. Modules on the CPU or on the meta device are moved group by
    group, so that no device holds the whole module.

    Args:
        module: The module; its parameters may be real, on the meta device, or fake.
        mesh: A mesh of one dimension.
        wrapping: The groups; by default those of `wrapping_of`.
        reshard_after_forward: Whether a group frees its gathered parameters after its forward pass. None frees those of
            the blocks, and keeps those of the root.

    Raises:
        ConfigurationError: If the mesh has another number of dimensions, or a parameter cannot be sharded.
    """
    if mesh.ndim != 1:
        raise ConfigurationError(
            f'strategy="unified_fsdp" shards over a mesh of one dimension and was given {mesh.ndim}: hybrid sharding and tensor '
            "parallelism are not supported; give a mesh of one dimension."
        )
    _refuse_parameters(module)
    _refuse_sparse(module)
    wrapping = wrapping_of(module) if wrapping is None else wrapping
    with keeping_attributes(module):
        for name in wrapping.blocks:
            fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    _known[module] = wrapping
    return wrapping


@contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Give the parameters that replace those of `module` inside the block their attributes.

    FSDP2, and a move of a sharded module to its device, keep none. `configure_optimizers` may group parameters by them.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        vars(parameter).update(attributes[name])


def known_wrapping(module: nn.Module) -> Wrapping | None:
    """Return the wrapping of a sharded module; None if its `configure_model` chose another one."""
    return _known.get(module)


def note_wrapping(module: nn.Module) -> None:
    """Note how a module has sharded itself, for dry runs.

    Call it before ranks hold whole parameters.
    """
    if module not in _known and (groups := groups_of(module)) is not None:
        _known[module] = Wrapping(blocks=groups[:-1], reason="as configure_model shards it")


def is_sharded(module: nn.Module) -> bool:
    """Return whether `module` or a module in it is sharded by FSDP2."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def sharded_roots(module: nn.Module) -> list[FSDPModule]:
    """Return the outermost sharded modules: `module` itself, or those that its `configure_model` sharded."""
    if isinstance(module, FSDPModule):
        return [module]
    roots: list[FSDPModule] = []
    for child in module.children():
        roots += [root for root in sharded_roots(child) if all(root is not other for other in roots)]
    return roots


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory on `device`, and their initial values.

    Raises:
        ConfigurationError: If a module with such parameters has no `reset_parameters`.
    """
    for name, child in module.named_modules():
        own = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(child, "reset_parameters", None)
        if not callable(reset):
            raise ConfigurationError(
                f"{name or type(module).__name__} ({type(child).__name__}) has parameters on the meta device and no reset_parameters() that "
                "gives them values; add it, or build the module on the CPU."
            )
        child.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()


def _owned(module: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter once for each of its names, in modules that are visited once."""
    for child in module.modules():
        for _, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            yield parameter


def _refuse_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ConfigurationError(
                f'strategy="unified_fsdp" cannot shard the parameter {name}, which has no dimension; make it a tensor of shape (1,).'
            )
        if not parameter.is_contiguous():
            raise ConfigurationError(
                f'strategy="unified_fsdp" cannot shard the parameter {name}, whose memory is not contiguous: strides '
                f"{parameter.stride()} for shape {tuple(parameter.shape)}; make it contiguous()."
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise refusal_of_hook(name)  # FSDP2 puts shards in the place of parameters, and drops their hooks


def _refuse_sparse(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse and child.weight.requires_grad:
            raise ConfigurationError(
                f'strategy="unified_fsdp" reduces dense gradients, and {name} makes sparse ones; make the layer with sparse=False, or use '
                'strategy="ddp".'
            )
