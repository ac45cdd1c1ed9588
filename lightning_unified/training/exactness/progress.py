"""What of a run's progress a step reads, and what of its module changes between steps: a loss that depends on them may change its nature.

A contrastive term may be switched on in a later epoch, warmed up by the step, or set by a hook; a backbone may be unfrozen. The batch shows
nothing of that, so these are facts too: batches with new facts are checked before their update (see profile.py).
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import lightning as L
from torch import nn

__all__ = ["Counters", "WatchedIndex", "facts_of_module"]

_DENSE = 16  # batches of which each is checked where the step reads a step counter; then one in so many

Fact = tuple[str, str, Any]


class Counters:
    """Notes which counters a step reads: `"epoch"`, `"step"` or `"batch"`.

    Attributes:
        read: The counters read so far.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note reads of `current_epoch` and `global_step`, of the module and of its Trainer, inside the block."""
        with ExitStack() as undo:
            for owner in (L.LightningModule, L.Trainer):
                for name, counter in (("current_epoch", "epoch"), ("global_step", "step")):
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, self._noting(getattr(owner, name), counter))
            yield

    def _noting(self, known: property, counter: str) -> property:
        def read(owner: Any) -> Any:
            self.read.add(counter)
            return None if known.fget is None else known.fget(owner)

        return property(read, known.fset, known.fdel, known.__doc__)

    def facts(self, *, epoch: int, step: int, batch: int) -> frozenset[Fact]:
        """Return where the run is, as far as steps read it: each epoch is new, and so are the first 16 steps and one in 16 after them."""
        values = {"epoch": epoch, "step": _sparse(step), "batch": _sparse(batch)}
        return frozenset(("progress", counter, values[counter]) for counter in self.read)


def _sparse(count: int) -> int:
    return count if count < _DENSE else count // _DENSE * _DENSE


class WatchedIndex(int):
    """A batch index that notes whether anything is computed with it or compared to it."""

    counters: Counters

    def __new__(cls, value: int, counters: Counters) -> Self:
        """Return an index equal to `value`, which notes its use in `counters`."""
        index = super().__new__(cls, value)
        index.counters = counters
        return index

    def __hash__(self) -> int:
        return int.__hash__(self)


def _noted(name: str) -> Any:
    plain = getattr(int, name)

    def use(self: WatchedIndex, *others: Any) -> Any:
        self.counters.read.add("batch")
        return plain(self, *others)

    return use


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "mod", "floordiv", "truediv", "add", "sub", "mul", "bool", "float"):
    setattr(WatchedIndex, f"__{_name}__", _noted(f"__{_name}__"))


def facts_of_module(module: nn.Module) -> frozenset[Fact]:
    """Return what of a module may decide how it computes: modes, which parameters are trained, and its plain attributes.

    Numbers count by their sign and order of magnitude, so that counters are news ever more rarely. Attributes of torch's own layers
    are left out.
    """
    facts: set[Fact] = {
        ("module", "modes", bytes(bool(child.training) for child in module.modules())),
        ("module", "trained", bytes(parameter.requires_grad for parameter in module.parameters())),
    }
    for path, child in module.named_modules():
        if not type(child).__module__.startswith("torch."):
            for name, value in vars(child).items():
                if isinstance(value, (bool, str, type(None))):
                    facts.add((f"{path}.{name}", "attribute", value))
                elif isinstance(value, (int, float)):
                    facts.add((f"{path}.{name}", "attribute", _order(value)))
    return frozenset(facts)


def _order(number: float) -> tuple[int, int]:
    """Return the sign of a number and the power of two just above it."""
    if not math.isfinite(number):
        return (0, 1 << 16)
    return ((number > 0) - (number < 0), math.frexp(float(number))[1])
