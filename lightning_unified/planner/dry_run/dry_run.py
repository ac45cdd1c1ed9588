"""One dry run: trace one step of a fake fit, or several on the same fake copy.

Further steps are traced on the same copy only where that gives the same result as a new dry run.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lightning_unified.cost_model.trace.trace import Take, Trace
from lightning_unified.errors import DryRunError, LightningUnifiedError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run.fake_fit import FakeFit, StepSize, StepSpec, Templates
from lightning_unified.planner.dry_run.isolation import untouched
from lightning_unified.planner.fake.mode import World, fake_world
from lightning_unified.step.undo import EVALUATION_STEPS, TRAINING_STEP, StateWatch, roots_of

__all__ = ["DryRun"]


class DryRun:
    """Traces steps of one module.

    Args:
        spec: The step to trace.
        recompute: As for `trace_step`.

    Raises:
        DryRunError: If `spec` names an unknown optimizer kernel.
    """

    def __init__(self, spec: StepSpec, *, recompute: RecomputePolicy | bool | None = None) -> None:
        spec.check()
        self._spec, self._templates, self._recompute = spec, Templates(spec), recompute
        self._fit: FakeFit | None = None
        # the fake copy shares the user's objects, globals and closure variables, in which a step may leave fake tensors
        roots = partial(roots_of, spec.module, spec.live, (*TRAINING_STEP, *EVALUATION_STEPS))
        self._state = StateWatch(roots, tensors=False)

    def run(self, rows: int, parts: int = 1, later_rows: int | None = None) -> Trace:
        """Return the trace of a step.

        If made-up values may have decided a shape, the step is traced once more with other made-up values. Equal allocations in both
        traces show that they did not.

        Args:
            rows: Rows of the first micro-batch.
            parts: The number of micro-batches.
            later_rows: Rows of every micro-batch but the first; None for `rows`.

        Raises:
            DryRunError: As `trace_step`.
        """
        if rows < 1 or parts < 1:
            raise DryRunError(f"rows={rows}, parts={parts}: give 1 or more of each.")
        size = _size(rows, parts, later_rows)
        trace = self._guarded(partial(self._first, size))
        if trace.confidence != "low":
            return trace
        self._fit = None
        try:
            again = self._guarded(partial(self._first, size, other=True))
        except DryRunError:
            return trace
        finally:
            self._fit = None
        if _allocations(again) != _allocations(trace):
            return trace
        return replace(trace, reads=tuple(replace(read, shapes=False) for read in trace.reads))

    def go_on(
        self, rows: int, parts: int, later_rows: int | None = None, *, recompute: RecomputePolicy | bool | None = None
    ) -> Trace | None:
        """Trace one more step on the same fake copy.

        It begins in the state in which the first traced step began.

        All step counters are first set back. The recomputed blocks may differ from the first step's: they decide which storages live
        within a step, and between two steps only their order.

        The result must equal that of a new dry run. Two comparisons ensure it. The storages that live before this step must equal, byte
        for byte and in the same order within each category, those before the first traced step. The storages that live after this step
        must equal them too: then the size of a step does not decide the state that the next one finds. Growing state, kept batch
        tensors and gradients in another order all fail these comparisons.

        Args:
            rows: As for `run`.
            parts: As for `run`.
            later_rows: As for `run`.
            recompute: As for `trace_step`.

        Returns:
            The trace; None if this size needs a dry run of its own.
        """
        fit, self._fit = self._fit, None
        if fit is None:
            return None
        self._recompute = recompute
        with contextlib.suppress(DryRunError):
            trace = self._guarded(partial(self._further, fit, _size(rows, parts, later_rows)))
            if trace.confidence != "low" and fit.recording.is_steady:
                self._fit = fit
                return trace
        return None

    def _guarded(self, traced: Callable[[], Trace]) -> Trace:
        """Return the trace, leave all else unchanged, and turn errors into `DryRunError`."""
        name, noted = type(self._spec.module).__name__, self._state.note()
        try:
            with untouched():
                return traced()
        except DryRunError:
            raise
        except LightningUnifiedError as error:
            raise DryRunError(f"{name} cannot be traced: {error}") from error
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise DryRunError(
                f"{name} cannot be run without values ({type(error).__name__}: {reason}); what it needs must be measured on the device."
            ) from error
        finally:
            noted.restore()

    def _first(self, size: StepSize, *, other: bool = False) -> Trace:
        world = World(other=other)
        with fake_world(world):
            fit = FakeFit(self._spec, self._templates, size, recompute=self._recompute, world=world)
            fit.run()
        trace = self._trace(fit)
        if fit.can_go_on:
            self._fit = fit
        return trace

    def _further(self, fit: FakeFit, size: StepSize) -> Trace:
        with fake_world(fit.world):
            fit.go_on(size, recompute=self._recompute)
        return self._trace(fit)

    def _trace(self, fit: FakeFit) -> Trace:
        spec, recording = self._spec, fit.recording
        if recording.events is None:
            raise DryRunError(f"the fit of {type(spec.module).__name__} ended before a step was over.")
        unwritten = not recording.wrote and not spec.validates
        options = {
            "precision": spec.precision,
            "recompute": self._recompute,
            "optimizer_kernel": spec.kernel,
            "loss_chunk": spec.loss_chunk,
        }
        return Trace(
            events=recording.events,
            rows=fit.size.rows,
            parts=fit.size.parts,
            length=fit.length,
            backend=spec.backend,
            reads=tuple(fit.world.answers.reads),
            notes=("no weights were written in the step that was followed",) if unwritten else (),
            options={name: str(value) for name, value in options.items() if value is not None},
        )


def _size(rows: int, parts: int, later_rows: int | None) -> StepSize:
    return StepSize(rows, parts, rows if later_rows is None else later_rows)


def _allocations(trace: Trace) -> list[int]:
    return [event.bytes for event in trace.events if isinstance(event, Take)]
