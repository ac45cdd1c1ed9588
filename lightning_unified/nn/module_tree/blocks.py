"""Find a module's blocks: the declared ones, or entries of its lists of equal layers."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_unified.nn.module_tree.walks import named_modules_of

__all__ = ["Blocks", "find_blocks"]

_DECLARATION = "recompute_blocks"
_LEAST_SHARE = (
    0.05  # of the parameters outside tables; no more, for convolutional nets have most where activations are few
)
_NAMED = 3  # lists named in a description


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Blocks by their names in the module, in the order it holds them.

    Attributes:
        modules: The blocks, none of them inside another.
        declared: Whether the module declares the blocks; otherwise they were detected.
        checkpointed: The names of blocks that the module's own code recomputes already.
    """

    modules: dict[str, nn.Module]
    declared: bool
    checkpointed: frozenset[str] = frozenset()

    @property
    def plain(self) -> list[nn.Module]:
        """The blocks that the module's own code does not recompute."""
        return [block for name, block in self.modules.items() if name not in self.checkpointed]

    def __str__(self) -> str:
        """Return a description: `"12 blocks of net.layers (TransformerEncoderLayer), detected"`."""
        places = list(dict.fromkeys(name.rpartition(".")[0] for name in self.modules))
        where = ", ".join(filter(None, places[:_NAMED])) or "the module"
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in self.modules.values()))
        text = f"{len(self.modules)} blocks of {where}{more} ({kinds}), {'declared' if self.declared else 'detected'}"
        if self.checkpointed:
            text += f"; {len(self.checkpointed)} of them the module recomputes itself (gradient checkpointing)"
        return text


def find_blocks(module: nn.Module) -> Blocks:
    """Return the blocks that activation checkpointing applies to: few inputs, many activations.

    A module may name them in `recompute_blocks`: a list of its submodules, or a method that returns one. Otherwise they
    are detected: entries of its `ModuleList` and `Sequential` containers with more than one layer, of which at least
    two have one class. Containers directly inside containers are searched too; a block inside a block is not taken. The
    blocks must hold a twentieth of the parameters, not counting embedding tables and output layers of a table's shape.

    Raises:
        ValueError: If the declaration is no list of submodules, or no block is declared or found; with the reason.
    """
    declared = getattr(module, _DECLARATION, None)
    blocks = _detected(module) if declared is None else _declared(module, declared)
    names = frozenset(name for name, block in blocks.items() if _checkpoints_itself(module, name, block))
    return Blocks(modules=blocks, declared=declared is not None, checkpointed=names)


def _declared(module: nn.Module, declaration: Any) -> dict[str, nn.Module]:
    kind = type(module).__name__
    given = declaration() if callable(declaration) and not isinstance(declaration, nn.Module) else declaration
    if isinstance(given, nn.Module) and not isinstance(given, (nn.ModuleList, nn.Sequential)):
        given = [given]
    if not isinstance(given, Iterable) or not (blocks := list(given)):
        raise ValueError(f"{kind}.{_DECLARATION} gives {given!r}; it must give submodules of {kind}, at least one.")
    names = {id(child): name for name, child in named_modules_of(module).items()}
    strangers = [block for block in blocks if id(block) not in names]
    if strangers:
        what = type(strangers[0]).__name__ if isinstance(strangers[0], nn.Module) else repr(strangers[0])
        raise ValueError(
            f"{kind}.{_DECLARATION} gives {what}, which is no submodule of {kind}; give the modules themselves, such as list(self.layers)."
        )
    found = {names[id(block)]: block for block in blocks}
    for name, block in found.items():
        if not _can_be_called(block):
            raise ValueError(
                f"{kind}.{_DECLARATION} gives {name} ({type(block).__name__}), which has no forward to recompute; give its modules."
            )
        outer = next(
            (other for other in found if name != other and name.startswith(f"{other}." if other else "")), None
        )
        if outer is not None:
            raise ValueError(
                f"{kind}.{_DECLARATION} gives {name} and {outer or kind}, which holds it; give one of them."
            )
    return found


def _detected(module: nn.Module) -> dict[str, nn.Module]:
    kind = type(module).__name__
    by_id = {
        id(block): (name, block) for name, block in reversed(list(_search(module, "")))
    }  # a block may have two names
    found = dict(reversed(by_id.values()))
    way_out = f"Declare the blocks: {_DECLARATION} = a list of submodules, or a method that gives one"
    if not found:
        raise ValueError(
            f"{kind} has no ModuleList or Sequential with two or more entries of one class that are made of several layers, so "
            f"no blocks were found to recompute. {way_out}."
        )
    tables = {child.weight.shape for child in module.modules() if isinstance(child, nn.Embedding)}
    total = sum(parameter.numel() for parameter in module.parameters() if parameter.shape not in tables)
    inside = sum(
        parameter.numel()
        for parameter in {id(one): one for block in found.values() for one in block.parameters()}.values()
        if parameter.shape not in tables
    )
    if inside < _LEAST_SHARE * total:
        raise ValueError(
            f"{kind} has {Blocks(modules=found, declared=False)}, but they hold {inside / total:.0%} of its parameters, so that "
            f"recomputing them would free little. {way_out}, these or others."
        )
    return found


def _search(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of the outermost containers, found by a search through all other modules."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        for child_name, child in module.named_children():
            yield from _search(child, _joined(name, child_name))
        return
    entries = list(_entries(module, name))
    often = Counter(type(entry) for _, entry in entries if _is_made_of_layers(entry))
    for entry_name, entry in entries:
        if often[type(entry)] > 1:
            yield entry_name, entry
        else:
            yield from _search(entry, entry_name)


def _entries(container: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a container's entries.

    The entries of an inner container replace it if one of them has several layers.
    """
    for child_name, child in container.named_children():
        full = _joined(name, child_name)
        inner = list(_entries(child, full)) if type(child) in (nn.ModuleList, nn.Sequential) else []
        if any(_is_made_of_layers(entry) for _, entry in inner):
            yield from inner
        else:
            yield full, child


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _is_made_of_layers(block: nn.Module) -> bool:
    """Return whether `block` may save more than its input for backward.

    A single torch layer saves no more.
    """
    kinds = (kind for kind in type(block).__mro__ if kind is not nn.Module)
    single = next(block.children(), None) is None and any(kind.__module__.startswith("torch.nn.") for kind in kinds)
    return not single and _can_be_called(block) and next(block.parameters(), None) is not None


def _can_be_called(block: nn.Module) -> bool:
    if isinstance(block, torch.jit.ScriptModule):
        return False  # its forward cannot be replaced
    return "forward" in vars(block) or type(block).forward is not nn.Module.forward


def _checkpoints_itself(module: nn.Module, name: str, block: nn.Module) -> bool:
    """Return whether Hugging Face's `gradient_checkpointing` is on for a block.

    The flag may belong to the block, a module in it or a module around it.
    """
    if any(getattr(child, "gradient_checkpointing", False) is True for child in block.modules()):
        return True
    if hasattr(block, "gradient_checkpointing"):
        return False
    parts = name.split(".")[:-1]
    holders = [module.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return any(getattr(holder, "gradient_checkpointing", False) is True for holder in holders)
