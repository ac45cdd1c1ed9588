"""Facts outside the batch: counters that a step reads, and changes of its module.

A contrastive term may be switched on in a later epoch, warmed up by the step, or set by a hook; a backbone may be unfrozen. The batch
shows none of these changes. So they are facts too, and a batch with new facts is checked before its update (see profile.py).
"""

import argparse
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import lightning as L
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor, nn

from lightning_unified.nn.second_run.libraries import is_ours
from lightning_unified.step.undo.functions import hook_functions, named_classes, names_of

__all__ = ["Counters", "ModuleFacts", "OutsideFacts", "WatchedIndex"]

_DENSE = 16  # if the step reads a step counter: the first 16 batches are checked, then one in 16
_GOLDEN = (5**0.5 - 1) / 2  # multiples modulo 1 fill the unit interval evenly

Fact = tuple[str, str, Any]


class Counters:
    """Records the counters of the run that a step reads.

    The counters are `"epoch"`, `"step"`, `"batch"`, `"rates"` (learning rates) and `"metrics"`.

    Attributes:
        read: The counters read so far.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record reads of counters, metrics and optimizers inside the block.

        These are attributes of the module and of its Trainer.
        """
        with ExitStack() as undo:
            for owner, names in _READS.items():
                for name, counter in names.items():
                    known: Any = getattr(owner, name)
                    undo.callback(setattr, owner, name, known)
                    is_property = isinstance(known, property)
                    setattr(
                        owner, name, self._noting(known, counter) if is_property else self._noting_call(known, counter)
                    )
            yield

    def _noting_call(self, known: Callable[..., Any], counter: str) -> Callable[..., Any]:
        @functools.wraps(known)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.read.add(counter)
            return known(*args, **kwargs)

        return call

    def _noting(self, known: property, counter: str) -> property:
        def read(owner: Any) -> Any:
            self.read.add(counter)
            return None if known.fget is None else known.fget(owner)

        return property(read, known.fset, known.fdel, known.__doc__)

    def facts(self, *, epoch: int, step: int, batch: int) -> frozenset[Fact]:
        """Return the facts about the counters that steps read.

        Each epoch is a new fact, each of the first 16 steps, and then one step in 16. The same holds for batch indices.
        """
        values = {"epoch": epoch, "step": _sparse(step), "batch": _sparse(batch)}
        return frozenset(("progress", counter, values[counter]) for counter in self.read & values.keys())

    def figures(self, trainer: L.Trainer) -> frozenset[Fact]:
        """Return facts about learning rates and metrics that steps read: their orders of magnitude."""
        facts: set[Fact] = set()
        if "rates" in self.read:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            facts |= {("progress", f"rate {index}", _order(float(group["lr"]))) for index, group in enumerate(groups)}
        if "metrics" in self.read:
            known = trainer.callback_metrics.items()
            facts |= {("progress", f"metric {name}", _order(float(value))) for name, value in known}
        return frozenset(facts)


_READS: dict[type, dict[str, str]] = {
    L.LightningModule: {
        "current_epoch": "epoch",
        "global_step": "step",
        "optimizers": "rates",
        "lr_schedulers": "rates",
    },
    L.Trainer: {
        "current_epoch": "epoch",
        "global_step": "step",
        "optimizers": "rates",
        "callback_metrics": "metrics",
        "logged_metrics": "metrics",
    },
}


def _sparse(count: int) -> int:
    """Return a number that changes with each of the first counts, then once in 16.

    It changes at another place in each 16, so that no period of a step's condition is always missed.
    """
    block, offset = divmod(count, _DENSE)
    return count if not block else _DENSE + block + (offset >= int(_DENSE * (block * _GOLDEN % 1)))


class WatchedIndex(int):
    """A batch index that records whether a step computes with it or compares it."""

    counters: Counters

    def __new__(cls, value: int, counters: Counters) -> Self:
        """Return an index equal to `value` that records its use in `counters`."""
        index = super().__new__(cls, value)
        index.counters = counters
        return index

    def __hash__(self) -> int:  # defining `__eq__` would remove it
        self.counters.read.add("batch")
        return int.__hash__(self)


def _noted(name: str) -> Any:
    plain = getattr(int, name)

    def use(self: WatchedIndex, *others: Any) -> Any:
        self.counters.read.add("batch")
        return plain(self, *others)

    return use


_BINARY = ("mod", "floordiv", "truediv", "divmod", "add", "sub", "mul", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in (
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "bool",
        "float",
        "int",
        "index",
        "neg",
        "abs",
        "invert",
        "str",
        "repr",
        "format",
    ),
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
):
    setattr(WatchedIndex, f"__{_name}__", _noted(f"__{_name}__"))


class ModuleFacts:
    """Facts about a module: modes, trained parameters, plain attributes.

    A change of these may change the computation. A module may hold settings in a namespace, in an object of the user's, or among its
    hyperparameters, and a counter in a buffer. The fact of a number is its sign and order of magnitude, so counters give new facts ever
    more rarely. Attributes of torch's own layers are skipped. `now` runs before every split batch, so it walks the tree of modules only
    after a change.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children: list[nn.Module | None] | None = None

    def now(self) -> frozenset[Fact]:
        """Return the current facts."""
        children = self._children
        found = None if children is None else self._children_now()
        same = found is not None and len(found) == len(children or ()) and all(map(operator.is_, found, children or ()))
        if not same or any(owner.get(name) is not value for owner, name, value in self._holders):
            self._scan()
        modes = bytes([bool(child.training) for child in self._modules])
        trained = bytes([one.requires_grad for held in self._parameters for one in held.values() if one is not None])
        return self._attributes() | self._counted() | {("module", "modes", modes), ("module", "trained", trained)}

    def _children_now(self) -> list[nn.Module | None]:
        return [child for held in self._held for child in held.values()]

    def _scan(self) -> None:
        paths, self._modules = zip(*self._module.named_modules(), strict=True)
        self._held = [child._modules for child in self._modules]
        self._parameters = [child._parameters for child in self._modules]
        self._children = self._children_now()
        ours = [(path, one) for path, one in zip(paths, self._modules, strict=True) if not _is_of_torch(one)]
        self._paths, self._owned = [path for path, _ in ours], [vars(one) for _, one in ours]
        self._holders = [
            (vars(one), name, value)
            for _, one in ours
            for name, value in vars(one).items()
            if name not in _OF_LIGHTNING and _is_holder(value)
        ]
        self._paths += [f"holder {name}" for _, name, _ in self._holders]
        self._owned += [value if isinstance(value, dict) else vars(value) for _, _, value in self._holders]
        self._buffers = [(path, one._buffers) for path, one in ours if one._buffers]
        self._plain: list[Any] = []
        self._facts: frozenset[Fact] = frozenset()

    def _attributes(self) -> frozenset[Fact]:
        plain = [_plain_of(held) for held in self._owned]
        if plain != self._plain:
            self._plain = plain
            self._facts = frozenset(
                fact for path, held in zip(self._paths, plain, strict=True) for fact in _facts_of_plain(path, held)
            )
        return self._facts

    def _counted(self) -> frozenset[Fact]:
        """Return the facts about buffers with one entry, such as step counters."""
        found = (
            (f"{path}.{name}", one) for path, held in self._buffers for name, one in held.items() if _is_number(one)
        )
        return frozenset(
            (path, "attribute", _order(float(one))) for path, one in itertools.islice(found, _MOST_BUFFERS)
        )


_MOST_ENTRIES = 1024  # of attributes or of a dict; larger ones hold data, not settings
_OF_LIGHTNING = frozenset(vars(L.LightningModule()))
_SHORT = 16  # entries of a list of settings; longer ones hold data
_MOST_BUFFERS = 8  # each costs a transfer from the device
_NAMES = (bool, str, type(None))
_PLAIN = (*_NAMES, int, float)


def _is_number(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.numel() == 1 and not buffer.is_complex() and not buffer.is_meta


def _is_holder(value: Any) -> bool:
    """Return whether `value` may hold settings.

    Such values are namespaces, hyperparameters, dicts of settings, and objects of the user's with attributes.
    """
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace, AttributeDict)):
        return True
    if isinstance(value, dict):
        return len(value) <= _MOST_ENTRIES and all(isinstance(name, str) for name in value)
    skipped = isinstance(value, (nn.Module, Tensor, type, dict, list, tuple, set)) or callable(value)
    return not skipped and hasattr(value, "__dict__") and not is_ours(type(value))


def _plain_of(held: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the plain values among attributes, in short lists too, and those of scalar tensors on the host."""
    found: list[tuple[str, Any]] = []
    for name, value in itertools.islice(held.items(), _MOST_ENTRIES):
        if isinstance(value, _PLAIN):
            found.append((name, value))
        elif type(value) in (list, tuple) and len(value) <= _SHORT:
            found += [(f"{name}.{at}", one) for at, one in enumerate(value) if isinstance(one, _PLAIN)]
        elif type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu" and not value.is_complex():
            found.append((name, value.item()))
    return found


def _facts_of_plain(path: str, values: Iterable[tuple[str, Any]]) -> Iterator[Fact]:
    """Yield a fact for each named value; a number counts by its order of magnitude."""
    for name, value in values:
        yield f"{path}.{name}", "attribute", value if isinstance(value, _NAMES) else _order(value)


class OutsideFacts:
    """Facts about plain values in the globals, classes and closures that `training_step` names.

    Args:
        module: The module that defines `training_step`.
    """

    def __init__(self, module: nn.Module) -> None:
        functions = hook_functions(module, ("training_step",))
        self._cells, self._classes = names_of(functions), named_classes(functions)

    def now(self) -> frozenset[Fact]:
        """Return the current facts."""
        found = {str(name): value for cell in self._cells for name, value in cell.entries(cell.copy())}
        facts = set(_facts_of_plain("outside", _plain_of(found)))
        for name, value in found.items():
            if _is_holder(value):
                facts.update(_facts_of_plain(name, _plain_of(value if isinstance(value, dict) else vars(value))))
        for kind in self._classes:
            facts.update(_facts_of_plain(f"class {kind.__name__}", _plain_of(dict(vars(kind)))))
        return frozenset(facts)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _order(number: float) -> tuple[int, int]:
    """Return the sign of a number and the exponent of the power of two just above its magnitude."""
    number = float(number)  # comparisons of NumPy's numbers give booleans without a difference
    if not math.isfinite(number):
        return (0, 1 << 16)
    return ((number > 0) - (number < 0), math.frexp(number)[1])
