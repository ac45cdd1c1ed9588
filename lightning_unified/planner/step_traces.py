"""Traces of one module's step, by combination of memory options and micro-batch size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L

from lightning_unified.cost_model.candidates import even_splits
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.planner.bounds import Bounds
from lightning_unified.planner.combinations import Combination
from lightning_unified.planner.dry_run import DryRuns
from lightning_unified.planner.traced_sizes import TracedSizes, adjusted
from lightning_unified.step.split import splitter_of, tensors_in
from lightning_unified.step.split.rules import given_to, rules_of

__all__ = ["CountedMemory", "SizeLimits", "StepTraces"]


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
        mmap_threshold: On a CPU, `M_MMAP_THRESHOLD` in bytes if it is set; None means the C library's default, which changes at run time.
    """

    updates: bool = True
    workspaces: bool = True
    reduction_bytes: int = 0
    mmap_threshold: int | None = None


class StepTraces:
    """The traces of a module's step for one batch on one backend; every dry run is kept.

    Args:
        module: The module, which stays unchanged; its weights may be on any device, the meta device included.
        batch: A whole batch, from the loader or after the rule `prepare`.
        is_prepared: Whether the rule `prepare` has been applied to `batch`; if not, a dry run applies it.
        backend: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`; the device need not be here.
        trainer: The Trainer of the fit, with its callbacks, clipping and accumulation windows; None for a default Trainer.
        limits: The micro-batch sizes that are allowed.
        counted: The memory to count beside the tensors of the step.

    Attributes:
        rows: Rows of the batch; 1 for a batch without a row dimension.
        unit: Rows that stay together; all rows of a batch that cannot be split.
        ways: The rows of each micro-batch, for each way to split the batch evenly; the fewest micro-batches come first.
    """

    def __init__(
        self,
        module: L.LightningModule,
        batch: Any,
        *,
        is_prepared: bool,
        backend: str,
        trainer: L.Trainer | None,
        limits: SizeLimits,
        counted: CountedMemory,
    ) -> None:
        rules = rules_of(module, "fit", given=given_to(trainer))
        splitter = splitter_of(module, "fit", trainer=trainer)
        shape = splitter.shape(batch)
        whole = shape is None or not rules.splittable or splitter.refusal(batch, shape.rows) is not None
        self.rows = 1 if shape is None else shape.rows
        self.unit = self.rows if whole else limits.unit or rules.unit
        self.ways = even_splits(self.rows, unit=self.unit, least=limits.least, most=limits.micro_batch_size)
        self._module, self._counted = module, counted
        self._has_encoders = bool(rules.encoders)
        self._row_bytes = sum(one.numel() * one.element_size() for one in tensors_in(batch)) // self.rows
        self._dry_runs = partial(
            DryRuns, module, batch, is_prepared=is_prepared, backend=backend, trainer=trainer, fake_copies={}
        )
        self._sizes: dict[Combination, TracedSizes] = {}

    def of(self, combination: Combination, *, bounds: Bounds | None = None) -> TracedSizes:
        """Return the step under `combination` at any micro-batch size.

        Args:
            combination: The combination of memory options.
            bounds: Lower bounds from the user's own step, used the first time a combination is asked for.
        """
        if combination not in self._sizes:
            self._sizes[combination] = TracedSizes(
                self._traced(combination),
                rows=self.rows,
                unit=self.unit,
                row_bytes=self._row_bytes,
                workspaces=self._counted.workspaces,
                least=None if bounds is None else bounds.bytes(combination),
                holds_batch=self._has_encoders,
            )
        return self._sizes[combination]

    def exactly(self, combination: Combination, micro_batch_size: int | None) -> tuple[Trace, int]:
        """Return the trace of a dry run at that size, and the number of micro-batches.

        A size of None means the whole batch.
        """
        rows = min(micro_batch_size or self.rows, self.rows)
        parts = -(-self.rows // rows)
        return self.of(combination).exactly(rows, parts=parts), parts

    def bounds(self, own: Combination) -> Bounds:
        """Return lower bounds for other combinations.

        They follow from the user's own step in the fewest micro-batches allowed.
        """
        fewest = self.ways[0]
        return Bounds(self._module, own, lambda: self.of(own).at(fewest[0], parts=len(fewest)), sizes=fewest)

    def _traced(self, combination: Combination) -> Callable[[int, int, int], Trace]:
        step = self._dry_runs(
            precision=combination.precision,
            recompute=combination.recompute,
            optimizer_kernel=combination.optimizer_kernel,
            loss_chunk=combination.loss_chunk,
        ).step
        counted = self._counted

        def traced(rows: int, parts: int, later_rows: int) -> Trace:
            trace = step(rows, parts, later_rows)
            return adjusted(trace, updates=counted.updates, reduction_bytes=counted.reduction_bytes)

        return traced
