"""Traces of one module's step, by combination of memory options and micro-batch size."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_unified.cost_model.candidates import even_splits
from lightning_unified.cost_model.generation import generation_before
from lightning_unified.cost_model.trace.sampling import with_sampling
from lightning_unified.cost_model.trace.trace import Trace, Work
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.planner.dry_run import DryRun, DryRuns, StepSpec, watch_of
from lightning_unified.planner.repeats import Twins
from lightning_unified.planner.search.bounds import Bounds
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.traced_sizes import TracedSizes, adjusted
from lightning_unified.step.split import splitter_of, tensors_in
from lightning_unified.step.split.rules import given_to, rules_of
from lightning_unified.step.undo import StateWatch

__all__ = ["BatchRows", "CountedMemory", "KnownModule", "SizeLimits", "StepTraces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeLimits:
    """The micro-batch sizes that are allowed.

    Attributes:
        unit: Rows that stay together; None for the unit that the module declares.
        least: Rows that every micro-batch needs.
        micro_batch_size: The largest micro-batch size allowed; None allows the whole batch.
    """

    unit: int | None = None
    least: int = 1
    micro_batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedMemory:
    """The memory to count beside the tensors of a step.

    Attributes:
        updates: Whether the step writes weights; if not, the optimizer's memory is left out.
        workspaces: Whether to count memory that the backend's libraries take for themselves; a simulated machine has none.
        reduction_bytes: Bytes that the device holds during the whole step to average gradients over ranks; counted as a workspace.
        reducing_ranks: Ranks over which gradients are summed after the last backward pass; 1 sums nothing.
        allocator: Settings of the machine's allocator.
    """

    updates: bool = True
    workspaces: bool = True
    reduction_bytes: int = 0
    reducing_ranks: int = 1
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRows:
    """The rows of a batch.

    Attributes:
        rows: Rows of the batch; 1 for a batch without a row dimension.
        unit: Rows that stay together; all rows of a batch that cannot be split.
        row_bytes: Bytes of one row.
        has_encoders: Whether the step runs whole, with only the module's encoders in micro-batches.
    """

    rows: int
    unit: int
    row_bytes: int
    has_encoders: bool

    @classmethod
    def of(cls, step: StepSpec) -> "BatchRows":
        """Return the rows of the batch of a training step, or of a validation step."""
        stage = "validate" if step.validates else "fit"
        rules = rules_of(step.module, stage, given=given_to(step.trainer))
        splitter = splitter_of(step.module, stage, trainer=step.trainer)
        shape = splitter.shape(step.batch)
        rows = 1 if shape is None else shape.rows
        whole = shape is None or not rules.splittable or splitter.refusal(step.batch, rows) is not None
        return cls(
            rows=rows,
            unit=rows if whole else rules.unit,
            row_bytes=sum(one.numel() * one.element_size() for one in tensors_in(step.batch)) // rows,
            has_encoders=bool(rules.encoders) and not step.validates,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModule:
    """What dry runs found out about a module, for those of other batches.

    Attributes:
        twins: The repeated blocks, by precision and attention.
        state: The watch of the state outside the fake copies, which keeps the objects that it found.
    """

    twins: dict[Any, Twins]
    state: StateWatch

    def twins_of(self, precision: str, attention: str | None) -> Twins:
        """Return the repeated blocks under an attention, for another dry run of the module."""
        return self.twins.get((precision, attention), Twins()).borrowed()


class StepTraces:
    """The traces of a module's step for one batch on one backend; every dry run is kept.

    Args:
        step: The step, whose memory options each combination replaces.
        like: What the traces of another batch found out about the same module and Trainer.

    Attributes:
        backend: The backend of the traces.
        limits, counted: As given.
        rows: Rows of the batch; 1 for a batch without a row dimension.
        unit: Rows that stay together; all rows of a batch that cannot be split.
        splits: The rows of each micro-batch, for each even split of the batch; the fewest micro-batches come first.
        operations: Operations in all dry runs so far, a measure of their cost that is the same on every machine.
        known: What the dry runs found out about the module.
    """

    def __init__(
        self,
        step: StepSpec,
        *,
        limits: SizeLimits | None = None,
        counted: CountedMemory | None = None,
        like: KnownModule | None = None,
    ) -> None:
        self.backend, self.limits, self.counted = step.backend, limits or SizeLimits(), counted or CountedMemory()
        self._step, self._batch = step, BatchRows.of(step)
        self.rows, unit = self._batch.rows, self._batch.unit
        self.unit = unit if unit == self.rows else self.limits.unit or unit
        self.splits = even_splits(
            self.rows, unit=self.unit, least=self.limits.least, micro_batch_size=self.limits.micro_batch_size
        )
        self._fake_copies: dict[Any, DryRun] = {}
        twins = {} if like is None else {key: twins.borrowed() for key, twins in like.twins.items()}
        self.known = KnownModule(twins=twins, state=watch_of(step) if like is None else like.state)
        self._sizes: dict[Combination, TracedSizes] = {}
        self._sampled: dict[str, Any] = {}  # the sampling before the step, by precision
        self._first: dict[str, Trace] = {}  # the user's own step, by precision: a search begins with it
        self.operations = 0

    @property
    def is_light(self) -> bool:
        """Whether the batch lies on no device."""
        return all(one.device.type in ("cpu", "meta") for one in tensors_in(self._step.batch))

    def of(self, combination: Combination, *, bounds: Bounds | None = None) -> TracedSizes:
        """Return the step under `combination` at any micro-batch size.

        Args:
            combination: The combination of memory options.
            bounds: Lower bounds from the user's own step, used the first time a combination is asked for.
        """
        if combination not in self._sizes:
            self._sizes[combination] = TracedSizes(
                self.dry_run(combination),
                rows=self.rows,
                unit=self.unit,
                row_bytes=self._batch.row_bytes,
                workspaces=self.counted.workspaces,
                least=None if bounds is None else bounds.bytes(combination),
                holds_batch=self._batch.has_encoders,
                with_sampling=self._sampling(combination.precision),
                trace_whole=self.dry_run(combination, whole_chunks=True),
            )
        return self._sizes[combination]

    def _sampling(self, precision: str) -> Callable[[Trace], Trace] | None:
        """Return the function that adds the sampling before the step to a trace.

        None without sampling, or if its sizes are unknown.
        """
        if precision not in self._sampled:
            self._sampled[precision] = None
            with suppress(ValueError):  # `with_generation` reports it
                self._sampled[precision] = generation_before(self._step.module, self._step.batch, precision=precision)
        sampled = self._sampled[precision]
        if sampled is None:
            return None
        return lambda trace: with_sampling(trace, sampled, like=self._first.setdefault(precision, trace))

    def exactly(self, combination: Combination, micro_batch_size: int | None) -> tuple[Trace, int]:
        """Return the trace of a dry run at that size, and the number of micro-batches.

        A size of None means the whole batch.
        """
        rows = min(micro_batch_size or self.rows, self.rows)
        num_micro_batches = -(-self.rows // rows)
        return self.of(combination).exactly(rows, num_micro_batches=num_micro_batches), num_micro_batches

    def bounds(self, own: Combination) -> Bounds:
        """Return lower bounds for other combinations.

        They follow from the user's own step in the fewest micro-batches allowed.
        """
        fewest = self.splits[0]
        return Bounds(
            self._step.module, own, lambda: self.of(own).at(fewest[0], num_micro_batches=len(fewest)), sizes=fewest
        )

    def dry_run(self, combination: Combination, *, whole_chunks: bool = False) -> Callable[..., Trace]:
        """Return a function that traces the step, with the arguments of `DryRuns.step`.

        `whole_chunks` is as in `StepSpec`.
        """
        step = replace(
            self._step,
            whole_chunks=whole_chunks,
            precision=combination.precision,
            optimizer_kernel=combination.optimizer_kernel,
            loss_chunk=combination.loss_chunk,
            attention=combination.attention,
        )
        shared: dict[str, Any] = {
            "fake_copies": self._fake_copies,
            "twins": self.known.twins,
            "state": self.known.state,
        }
        dry_runs = DryRuns(step, recompute=combination.recompute, **shared)

        def traced(*size: int, **other: Any) -> Trace:
            trace = dry_runs.step(*size, **other)
            self.operations += sum(isinstance(event, Work) for event in trace.events)
            return adjusted(
                trace,
                updates=self.counted.updates,
                reduction_bytes=self.counted.reduction_bytes,
                reducing_ranks=self.counted.reducing_ranks,
            )

        return traced
