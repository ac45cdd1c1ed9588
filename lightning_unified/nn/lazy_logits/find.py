"""Find the output heads of a module, and what keeps them from lazy logits.

A head is a linear layer, or the product of hidden states with an embedding table (tied weights without a layer of their own). Heads of
Hugging Face models are known by their interface, all others by their shape: many more classes than features.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.nn.compiled import compiled_parts, is_compiled
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.nn.module_tree.walks import named_modules_of
from lightning_unified.nn.stand_in import FORWARD, StandIn, warn_once

__all__ = ["PLAIN", "TiedHead", "obstacles", "output_heads", "tied_heads"]

PLAIN = "Its logits are computed at once, as without memory.loss_chunk."

_SAID: set[str] = set()  # of this process: a plan asks for the heads many times
_CLASSES = 2048  # judgement: the logits of fewer classes are no larger than the activations of one block
_WIDER = 2  # judgement: classes for each feature of a head; most other layers are narrower


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TiedHead:
    """A product with the weight of an embedding table, in the code of a forward.

    Attributes:
        source: The module whose output is multiplied: a normalization outside the blocks.
        tables: The tables that it may be multiplied with.
    """

    source: nn.Module
    tables: tuple[nn.Embedding, ...]

    @property
    def weights(self) -> list[Tensor]:
        """The weights (V, D) of the tables."""
        return [table.weight for table in self.tables]


def output_heads(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of `module` that are output heads, by name.

    A Hugging Face model has one if its class has `loss_function`, and `get_output_embeddings()` returns a submodule. Elsewhere, a head is
    an `nn.Linear` outside the repeated blocks with at least 2,048 outputs, at least two for each input, that no other layer takes as its
    input.
    """
    models = dict(_hugging_face(module))
    return {**_heads_of_models(module, models), **_plain_heads(module, models)}


def tied_heads(module: nn.Module) -> dict[str, TiedHead]:
    """Return the normalizations whose output may be multiplied with an embedding table, by name.

    There are none beside output heads that are layers. The table has at least 2,048 rows.
    """
    models = dict(_hugging_face(module))
    if _heads_of_models(module, models) or _plain_heads(module, models):
        return {}
    outside = list(_outside(module, models))
    by_width: dict[int | None, list[nn.Embedding]] = {}
    for _, child in outside:
        if isinstance(child, nn.Embedding) and child.num_embeddings >= _CLASSES and _holds_weight(child):
            by_width.setdefault(child.embedding_dim, []).append(child)
    return {
        name: TiedHead(source=child, tables=tuple(by_width[width]))
        for name, child in _after_blocks(module, outside)
        if (width := _normalized(child)) in by_width
    }


def obstacles(module: nn.Module) -> dict[str, str]:
    """Return the output heads of `module` that cannot return lazy logits, with the reasons."""
    compiled, sharded = _compiled(module), _sharded(module)
    found = {name: _obstacle(name, head, compiled, sharded) for name, head in output_heads(module).items()}
    found |= {name: _obstacle_of_tied(name, head, compiled, sharded) for name, head in tied_heads(module).items()}
    return {name: why for name, why in found.items() if why}


def _hugging_face(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (
        (name, child)
        for name, child in named_modules_of(module).items()
        if hasattr(type(child), "get_output_embeddings")
    )


def _heads_of_models(module: nn.Module, models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    names = {id(child): name for name, child in named_modules_of(module).items()}
    found: dict[str, nn.Module] = {}
    for child in models.values():
        kind = type(child)
        if not hasattr(kind, "loss_function"):
            continue
        try:
            head = child.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        except (AttributeError, NotImplementedError):  # transformers' answer of a model without a head
            continue
        except Exception as error:  # the user's own method: the model trains without lazy logits
            warn_once(_SAID, f"{kind.__name__}.get_output_embeddings() raised {type(error).__name__}: {error}. {PLAIN}")
            continue
        if isinstance(head, nn.Module) and id(head) in names:
            found[names[id(head)]] = head
    return found


def _plain_heads(module: nn.Module, models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    outside = list(_outside(module, models))
    taken = {child.in_features for _, child in outside if isinstance(child, nn.Linear)}
    taken |= {width for _, child in outside if (width := _normalized(child)) is not None}
    return {
        name: child
        for name, child in outside
        if isinstance(child, nn.Linear)
        and type(child).forward is nn.Linear.forward
        and child.out_features >= max(_CLASSES, _WIDER * child.in_features)
        and child.out_features not in taken
    }


def _outside(module: nn.Module, models: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the repeated blocks and outside Hugging Face models."""
    inside = [*_blocks(module), *models]
    return (
        (name, child)
        for name, child in named_modules_of(module).items()
        if not any(_is_in(name, outer) for outer in inside)
    )


def _blocks(module: nn.Module) -> list[str]:
    try:
        return list(find_blocks(module).modules)
    except ValueError:
        return []


def _after_blocks(module: nn.Module, outside: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the normalizations registered after the blocks; all modules if there are none.

    Lazy states may not enter compiled code, so beside compiled parts the others are left out.
    """
    order = {name: at for at, (name, _) in enumerate(module.named_modules())}
    last = max((order[name] for name in _blocks(module) if name in order), default=-1)
    after = [(name, child) for name, child in outside if order[name] > last and _normalized(child) is not None]
    return after if after or compiled_parts(module) else outside


def _normalized(module: nn.Module) -> int | None:
    """Return the number of features that a module normalizes; None for another module."""
    weight = module._parameters.get(
        "weight"
    )  # an attribute could be a function of other parameters, with state of its own
    if "norm" not in type(module).__name__.lower() or weight is None or weight.dim() != 1:
        return None
    return weight.shape[0]


def _holds_weight(module: nn.Module) -> bool:
    """Return whether the module's weight is a parameter.

    `torch.nn.utils.parametrize` computes it from others.
    """
    return module._parameters.get("weight") is not None


def _obstacle(name: str, head: nn.Module, compiled: dict[str, str], sharded: dict[str, str]) -> str:
    """Return why a head cannot return lazy logits; empty if it can."""
    if why := _obstacle_around(name, compiled, sharded) or _obstacle_of_forward(head):
        return why
    if not isinstance(head, nn.Linear) and not type(head).__module__.startswith("peft."):
        return f"{type(head).__name__} is not known to treat each position by itself"
    if any(isinstance(child, nn.Linear) and not _holds_weight(child) for child in head.modules()):
        return "its weight is computed from other parameters"
    if any(
        is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)
        for parameter in head.parameters()
    ):
        return "its weights are a tensor subclass"
    return ""  # FSDP2 replaces its parameters, which are a DTensor, by whole ones before the step


def _obstacle_of_tied(name: str, head: TiedHead, compiled: dict[str, str], sharded: dict[str, str]) -> str:
    """Return why the products of a module's output cannot be lazy; empty if they can."""
    if why := _obstacle_around(name, compiled, sharded) or _obstacle_of_forward(head.source):
        return why
    if any(is_traceable_wrapper_subclass(weight) for weight in head.weights):
        return "the weights of its tables are a tensor subclass"
    return ""


def _obstacle_around(name: str, compiled: dict[str, str], sharded: dict[str, str]) -> str:
    for outer, kind in compiled.items():
        if _is_in(name, outer):
            return f"{kind} is compiled"
    for outer, kind in sharded.items():
        if outer and _is_in(name, outer):
            return f"FSDP2 gathers {kind} for its own forward only"
    return ""


def _obstacle_of_forward(module: nn.Module) -> str:
    own = vars(module).get(FORWARD)
    is_own = own is None or isinstance(own, StandIn) or getattr(own, "__func__", None) is type(module).forward
    return "" if is_own else "its forward was replaced on the object"


def _is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _sharded(module: nn.Module) -> dict[str, str]:
    """Return the classes of submodules that FSDP2 gathers, by name."""
    return {name: type(child).__name__ for name, child in module.named_modules() if isinstance(child, FSDPModule)}


def _compiled(module: nn.Module) -> dict[str, str]:
    """Return the classes of compiled submodules, by name."""
    found: dict[str, str] = {}
    for name, child in module.named_modules():
        if is_compiled(child):
            found[name] = type(getattr(child, "_orig_mod", child)).__name__
    return found
