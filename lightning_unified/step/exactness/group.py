"""The processes that run a check: one alone, or ranks that run each check together."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.profile import Fact
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.split import split_rows
from lightning_unified.terminal import activity

__all__ = ["CheckGroup", "Request", "compared"]

_T = TypeVar("_T")
_FEW = 6  # units that are split into three unequal micro-batches, the smallest of one unit


@dataclass(frozen=True, kw_only=True)
class Request:
    """A batch to check.

    Args:
        kwargs: The arguments of `training_step`, the batch first.
        rows: The number of rows of the batch.
        unit: The number of rows that a split keeps together.
        micro_batch_size: The rows of the largest micro-batch.
        facts: The facts about the batch for which the check is due.
        is_checked: Whether gradients of some rows of the batch are compared already.
        micro_batches: The rows of each micro-batch, if all rows are to be compared too.
        differing: Neighbouring rows, some of which differ from others in a new way; none where unknown.
        failed: The fewest rows for which memory is known to run out; None where it is not.
        allows_batch_norm: Whether BatchNorm may run with statistics of the batch: the user accepts it, or the batch runs whole.
        is_as_split: Whether the check runs the batch's own micro-batches, because the step fails on fewer rows.
    """

    kwargs: "OrderedDict[str, Any]"
    rows: int
    unit: int
    micro_batch_size: int
    facts: frozenset[Any] = frozenset()
    is_checked: bool = False
    micro_batches: Sequence[int] = ()
    differing: range = range(0)
    failed: int | None = None
    allows_batch_norm: bool = False
    is_as_split: bool = False

    @property
    def batch(self) -> Any:
        """The whole batch."""
        return next(iter(self.kwargs.values()))

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of each micro-batch of the batch."""
        size = max(self.micro_batch_size // self.unit * self.unit, self.unit)
        return split_rows(self.rows, micro_batch_size=size, unit=self.unit)

    @property
    def least(self) -> int:
        """The fewest units of a check's micro-batches: 1 only where one of the batch's own micro-batches has one.

        A step may drop the dimension of a single row (`squeeze()`).
        """
        return 1 if min(self.micro_batches or self.sizes) <= self.unit else 2

    @property
    def own_facts(self) -> frozenset[Fact]:
        """The facts about the micro-batches."""
        of_batch = "micro-batches"
        return frozenset({(of_batch, "least", self.least), (of_batch, "allow BatchNorm", self.allows_batch_norm)})


class CheckGroup:
    """The processes that run each check together: this one alone, with whole parameters.

    Ranks that hold shards cannot run a pass alone. `step.sharding.checks` has their group.
    """

    has_whole_parameters = True

    def next(self, own: Request, *, asks: bool) -> Request | None:
        """Return the next batch to check; None if there is none.

        All processes of a group call it at the same points of a step.

        Args:
            own: This process's batch.
            asks: Whether a check of `own` is due.
        """
        return own if asks else None

    def agreed(self, found: Findings | str | SplitError, rules: Sequence[LossRule]) -> Findings | str:  # noqa: ARG002
        """Return the findings of all processes together, or why they are undecided.

        Args:
            found: The findings of this process, or why they are undecided, or its refusal.
            rules: The rules of the check.

        Raises:
            SplitError: If one of the processes refuses.
        """
        if isinstance(found, SplitError):
            raise found
        return found

    def fits(self, fits: Callable[[int], bool | None]) -> Callable[[int], bool | None]:
        """Return the function that tells whether rows are predicted to fit for all processes.

        `fits` tells it for this one.
        """
        return fits

    def trial(self) -> AbstractContextManager[None]:
        """Run the step inside the block as all processes do; if memory runs out in one, it does in all."""
        return nullcontext()

    def passes(self) -> AbstractContextManager[None]:
        """Run the passes of a step inside the block, and leave the module as it is between steps."""
        return nullcontext()

    def anywhere(self, flag: bool) -> bool:
        """Return whether `flag` is set in one of the processes: a decision by which all run the same passes."""
        return flag

    def on_few_rows(self, asked: Request, findings: Callable[[Request], _T]) -> Callable[[], _T]:
        """Return a check that runs the batch's own micro-batches if the step fails on fewer rows.

        A batch of few units is checked with a single one, also where its own micro-batches have more.
        """

        def compare() -> _T:
            try:
                return findings(asked)
            except SplitError as refusal:
                is_few = refusal.is_of_rows and asked.least > 1 and asked.rows <= _FEW * asked.unit
                if not self.anywhere(is_few):
                    raise
            return findings(replace(asked, is_as_split=True))  # outside the block above: the traceback holds tensors

        return compare

    def joined(self, samples: list[Tensor]) -> list[Tensor]:
        """Return the entries of each parameter's gradient that all processes have, given those of this process."""
        return samples


def compared(compare: Callable[[], _T]) -> _T | SplitError:
    """Return what a comparison of whole and split rows finds, or its refusal."""
    with activity("comparing whole and split rows"):
        try:
            return compare()
        except SplitError as refusal:
            return refusal
