"""Rules by which a module's batches are split into micro-batches.

A module whose loss is a mean over rows, or over scored labels, declares nothing. Any other module defines one hook:

    class Tagger(L.LightningModule):
        def configure_micro_batches(self, stage: str) -> MicroBatchRules:
            return MicroBatchRules(loss_weight=lambda batch: batch["mask"].sum())

For a module you do not own, pass the same rules to the strategy: `UnifiedStrategy(micro_batches=MicroBatchRules(...))`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_unified.errors import ConfigurationError

__all__ = ["MergeRule", "MergeRules", "MicroBatchRules", "RowRules"]

NamedMerge = Literal["concatenate", "mean", "mean of rows", "sum", "max", "min", "equal"]
MergeRule = NamedMerge | Callable[[list[Any], list[int]], Any]


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """Rows of a batch, for batches whose rows cannot be inferred.

    Args:
        split: `split(batch, start, stop)` returns rows `start` to `stop` of `batch`, as a batch of the same kind.
        count: `count(batch)` returns the number of rows of `batch`, an int of 1 or more.
        shared: Paths of the entries that have no row dimension, although their first dimension may equal the number of rows: keys,
            field names or indices joined by dots, e.g. `("edge_index", "targets.weights", "1")`. Every micro-batch gets them whole.

    Raises:
        ConfigurationError: If an argument is of another type.
    """

    split: Callable[[Any, int, int], Any] | None = None
    count: Callable[[Any], int] | None = None
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise for arguments of another type."""
        _require_callables(self, "split", "count")
        _require_names(self, "shared")


@dataclass(frozen=True, kw_only=True)
class MergeRules:
    """How results of micro-batches merge, if the exactness check cannot infer it.

    A rule is one of the names below, or a function `merge(values, rows)` of the micro-batches' values and row counts.

    - `"concatenate"`: the values one after another, along the first dimension.
    - `"mean"`: the mean of the values, weighted by loss terms.
    - `"mean of rows"`: the mean of the values, weighted by rows.
    - `"sum"`, `"max"`, `"min"`: the sum, maximum or minimum of the values.
    - `"equal"`: the value itself; it must be the same in every micro-batch.

    Args:
        outputs: Rules for the step's return value, by path: keys or indices joined by dots; `""` is the returned value
            itself.
        logs: Rules for values of `self.log`, by the name logged.

    Raises:
        ConfigurationError: If a rule is none of these.
    """

    outputs: Mapping[str, MergeRule] = field(default_factory=dict)
    logs: Mapping[str, MergeRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise for unknown rules."""
        for group in ("outputs", "logs"):
            given = getattr(self, group)
            if not isinstance(given, Mapping):
                raise ConfigurationError(f"MergeRules({group}={given!r}): give a dict of names and rules.")
            for name, rule in given.items():
                if not callable(rule) and rule not in get_args(NamedMerge):
                    allowed = ", ".join(repr(known) for known in get_args(NamedMerge))
                    raise ConfigurationError(
                        f"MergeRules({group}={{{name!r}: {rule!r}}}): give one of {allowed}, or a function of the values and the row counts."
                    )


@dataclass(frozen=True, kw_only=True)
class MicroBatchRules:
    """How one module's batches are split, as far as the strategy cannot infer it.

    Every argument is optional.

    Args:
        loss_weight: `loss_weight(batch)` returns the number of terms the loss of `batch` is a mean over, such as its scored
            tokens. The exactness check infers rows and scored labels.
        loss_is_sum: Whether the losses of micro-batches add up to the whole batch's, because the step divides by totals that
            `prepare` has put into the batch. Logged means then add up as well.
        prepare: `prepare(batch)` runs once on the whole batch, before the split and without gradients; the step gets its
            result. Use it for totals, advantages, masks and noise of the whole batch. It does not run in validation, test and
            predict.
        unit: Number of neighbouring rows that stay together, such as the completions of one prompt.
        splittable: Whether batches may be split at all. With `False` they run whole.
        encoders: Names of submodules that treat each row by itself, as in `named_modules()`. Then `training_step` runs once
            on the whole batch, and these submodules run in checkpointed chunks of rows. This serves losses over pairs of
            rows, such as contrastive ones.
        batch_norm: Behaviour of BatchNorm in train mode when a batch must be split: `"refuse"` raises, `"micro"` accepts
            statistics of each micro-batch. `None` leaves it to the strategy.
        check: Whether the exactness check compares split and whole batches. `None` leaves it to the strategy.
        rows: Rows of a batch, if they cannot be inferred.
        merge: How outputs and logs of micro-batches merge into the whole batch's.

    Raises:
        ConfigurationError: If an argument has another type, or two of them contradict each other.

    Example:
        >>> MicroBatchRules(loss_weight=lambda batch: batch["mask"].sum(), unit=8).unit
        8
    """

    loss_weight: Callable[[Any], Any] | None = None
    loss_is_sum: bool = False
    prepare: Callable[[Any], Any] | None = None
    unit: int = 1
    splittable: bool = True
    encoders: tuple[str, ...] = ()
    batch_norm: Literal["refuse", "micro"] | None = None
    check: bool | None = None
    rows: RowRules = field(default_factory=RowRules)
    merge: MergeRules = field(default_factory=MergeRules)

    def __post_init__(self) -> None:
        """Raise for arguments of another type, and for pairs that contradict each other."""
        _require_callables(self, "loss_weight", "prepare")
        _require_names(self, "encoders")
        for name in ("loss_is_sum", "splittable"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"MicroBatchRules({name}={getattr(self, name)!r}): give True or False.")
        if isinstance(self.unit, bool) or not isinstance(self.unit, int) or self.unit < 1:
            raise ConfigurationError(f"MicroBatchRules(unit={self.unit!r}): give a positive number of rows.")
        if self.batch_norm not in (None, "refuse", "micro"):
            raise ConfigurationError(f'MicroBatchRules(batch_norm={self.batch_norm!r}): give "refuse" or "micro".')
        if self.check is not None and not isinstance(self.check, bool):
            raise ConfigurationError(f"MicroBatchRules(check={self.check!r}): give True, False or None.")
        for name, kind in (("rows", RowRules), ("merge", MergeRules)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(f"MicroBatchRules({name}={getattr(self, name)!r}): give {kind.__name__}(...).")
        if self.encoders and not self.splittable:
            raise ConfigurationError(
                "MicroBatchRules(encoders=…, splittable=False): encoders run in chunks of rows, which splittable=False forbids; "
                "leave one of them out."
            )


def _require_callables(rules: Any, *names: str) -> None:
    for name in names:
        value = getattr(rules, name)
        if value is not None and not callable(value):
            raise ConfigurationError(f"{type(rules).__name__}({name}={value!r}): give a function, or leave it out.")


def _require_names(rules: Any, *names: str) -> None:
    for name in names:
        value = getattr(rules, name)
        if not isinstance(value, tuple | list) or not all(isinstance(one, str) for one in value):
            raise ConfigurationError(f"{type(rules).__name__}({name}={value!r}): give a tuple of names.")
