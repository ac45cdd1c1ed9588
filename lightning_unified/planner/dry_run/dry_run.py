"""Dry runs: trace a step of a fake fit, at one size or at many.

Further sizes are traced on the same fake copy only where that gives the same result as a new dry run.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lightning_unified.cost_model.trace.gradient_buffer import with_gradient_buffer
from lightning_unified.cost_model.trace.trace import Take, Trace
from lightning_unified.errors import DryRunError, LightningUnifiedError
from lightning_unified.nn.cuda_graphs import replayed_parts
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run.fake_fit import FakeFit, Templates
from lightning_unified.planner.dry_run.isolation import untouched
from lightning_unified.planner.dry_run.spec import StepSize, StepSpec
from lightning_unified.planner.fake.awaited import AWAITED
from lightning_unified.planner.fake.mode import World, fake_world
from lightning_unified.planner.repeats import Twins, blocks_of
from lightning_unified.step.undo import EVALUATION_STEPS, TRAINING_STEP, StateWatch, roots_of

__all__ = ["DryRun", "DryRuns", "watch_of"]

Traced = TypeVar("Traced", Trace, Trace | None)


class DryRun:
    """Traces steps of one module: their operations, allocations and frees, run on fake tensors.

    Lightning's loops and this package's step run in full: `training_step`, backward, clipping, the optimizers, logging and callbacks that
    average weights. The traced step is the second one that writes weights, so optimizer state and the previous step's gradients exist.
    The module, random generators and the live Trainer stay unchanged.

    Args:
        recompute: The blocks that recompute their activations: True for all, False for none, a policy for some. None leaves the module
            as it is.
        twins: The module's repeated blocks, if dry runs share them.
        state: The watch of the state outside the fake copy, if dry runs share it.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        recompute: RecomputePolicy | bool | None = None,
        twins: Twins | None = None,
        state: StateWatch | None = None,
    ) -> None:
        self._twins = Twins() if twins is None else twins
        self._spec, self._templates, self._recompute = spec, Templates(spec), recompute
        self._fit: FakeFit | None = None
        self._state = watch_of(spec) if state is None else state

    def run(
        self, rows: int, num_micro_batches: int = 1, later_rows: int | None = None, *, length: int | None = None
    ) -> Trace:
        """Return the trace of a step.

        If made-up values may have decided a shape, the step is traced once more with other made-up values. Equal allocations in both
        traces show that they did not. A trace with a loop that waits for a value is not traced again: it has no other answer.

        Args:
            rows: Rows of the first micro-batch.
            num_micro_batches: The number of micro-batches.
            later_rows: Rows of every micro-batch but the first; None for `rows`.
            length: Positions of a row; None for the step's own.

        Raises:
            DryRunError: If the step cannot run without values; the message says where and why.
        """
        if rows < 1 or num_micro_batches < 1:
            raise DryRunError(f"rows={rows}, num_micro_batches={num_micro_batches}: give 1 or more of each.")
        size = _size(rows, num_micro_batches, later_rows, length)
        trace = self._guarded(partial(self._first, size))
        if trace.confidence != "low" or any(read.answer == AWAITED for read in trace.reads):
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
        self,
        rows: int,
        num_micro_batches: int,
        later_rows: int | None = None,
        *,
        recompute: RecomputePolicy | bool | None = None,
        length: int | None = None,
        spec: StepSpec | None = None,
        twins: Twins | None = None,
    ) -> Trace | None:
        """Trace one more step on the same fake copy.

        It begins in the state in which the first traced step began.

        All step counters are first set back. The recomputed blocks, the loss chunk, the attention and the batch may differ from the first
        step's: they decide which storages live within a step, and between two steps only their order.

        The result must equal that of a new dry run. Two comparisons ensure it. The storages that live before this step must equal, byte
        for byte and in the same order within each category, those before the first traced step. The storages that live after this step
        must equal them too: then the size of a step does not decide the state that the next one finds. Growing state, kept batch
        tensors and gradients in another order all fail these comparisons.

        The arguments are those of `run` and `DryRun`. A `spec` of the same module, precision and optimizer kernel replaces the one so far.

        Returns:
            The trace; None if this size needs a dry run of its own.
        """
        fit, self._fit = self._fit, None
        if fit is None:
            return None
        self._recompute, size = recompute, _size(rows, num_micro_batches, later_rows, length)
        self._twins = self._twins if twins is None else twins
        with contextlib.suppress(DryRunError):
            self._go_over_to(self._spec if spec is None else spec)
            trace = self._guarded(partial(self._further, fit, size))
            if trace is not None and trace.confidence != "low" and fit.recording.is_steady:
                self._fit = fit
                return trace
        return None

    def _go_over_to(self, spec: StepSpec) -> None:
        if spec.batch is not self._spec.batch:
            self._templates = Templates(spec)
        self._spec = spec

    def _guarded(self, traced: Callable[[], Traced]) -> Traced:
        """Return the trace, leave all else unchanged, and turn errors into `DryRunError`."""
        name, noted = type(self._spec.module).__name__, self._state.note()
        noted.iterators.lend()
        try:
            with untouched(compiled=self._spec.compiled):
                return traced()
        except DryRunError:
            raise
        except LightningUnifiedError as error:
            raise DryRunError(f"{name} cannot be traced: {error}") from error
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise DryRunError(
                f"{name} cannot be run without values ({type(error).__name__}: {reason}); its memory must be measured on the device."
            ) from error
        finally:
            noted.restore()
            noted.iterators.give_back()

    def _first(self, size: StepSize, *, other: bool = False) -> Trace:
        world, has_learnt = World(other=other), False
        with fake_world(world):
            fit = FakeFit(self._spec, self._templates, size, recompute=self._recompute, world=world, twins=self._twins)
            try:
                fit.run()
            except Exception as error:
                has_learnt = world.answers.learn_from(error)
                if not (has_learnt or fit.has_skipped):
                    raise
                fit.recording.is_unlike = not has_learnt  # what a skipped block leaves out may have been missing
        if has_learnt:
            return self._first(size, other=other)
        if fit.recording.is_unlike:
            self._twins.give_up()
            return self._first(size, other=other)
        trace = self._trace(fit)
        if fit.can_go_on:
            self._fit = fit
        return trace

    def _further(self, fit: FakeFit, size: StepSize) -> Trace | None:
        with fake_world(fit.world):
            fit.go_on(self._spec, self._templates, size, recompute=self._recompute, twins=self._twins)
        if fit.recording.is_unlike:
            self._twins.give_up()
            return None
        return self._trace(fit)

    def _trace(self, fit: FakeFit) -> Trace:
        spec, recording = self._spec, fit.recording
        if recording.events is None:
            raise DryRunError(f"the fit of {type(spec.module).__name__} ended before a step was over.")
        unwritten = not recording.wrote and not spec.validates
        replayed = replayed_parts(spec.module) if spec.backend == "cuda" else ()
        options = {
            "precision": spec.precision,
            "recompute": self._recompute,
            "optimizer_kernel": spec.optimizer_kernel,
            "loss_chunk": spec.loss_chunk,
            "attention": spec.attention,
        }
        return Trace(
            events=with_gradient_buffer(recording.events) if _train_all(spec.module, replayed) else recording.events,
            rows=fit.size.rows,
            num_micro_batches=fit.size.num_micro_batches,
            length=fit.length,
            backend=spec.backend,
            reads=tuple(fit.world.answers.reads),
            notes=("no weights were written in the recorded step",) if unwritten else (),
            options={name: str(value) for name, value in options.items() if value is not None},
            attends=fit.attends,
            recomputed_blocks=fit.recomputed_blocks,
            replayed=replayed,
        )


def watch_of(spec: StepSpec) -> StateWatch:
    """Return a watch of the state that a module shares with its fake copies.

    These are the user's objects, globals and closure variables, in which a step may leave fake tensors.
    """
    roots = partial(roots_of, spec.module, spec.trainer, (*TRAINING_STEP, *EVALUATION_STEPS))
    return StateWatch(roots, tensors=False)


class DryRuns:
    """Trace one module's step at many sizes, faster than one dry run each, with equal results.

    All sizes share one combination of memory options.

    A dry run executes an untraced step first, which leaves optimizer state and gradients. Further sizes are traced on the same fake copy
    if they begin in the same state (`DryRun.go_on` says how that is checked). If they do not, each size gets a new dry run.

    Args:
        fake_copies: Keeps the last dry run, by precision and kernel. Combinations that differ only in other memory options share this mapping,
            and so one fake copy.
        twins: Keeps the module's repeated blocks, by precision and attention; they hold for all fake copies.
        state: The watch of the state outside the fake copies; None for a new one.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        recompute: RecomputePolicy | bool | None = None,
        fake_copies: dict[Any, DryRun] | None = None,
        twins: dict[Any, Twins] | None = None,
        state: StateWatch | None = None,
    ) -> None:
        self._spec, self._recompute, self._state = spec, recompute, watch_of(spec) if state is None else state
        self._key = (spec.precision, spec.optimizer_kernel)
        self._all_twins: dict[Any, Twins] = {} if twins is None else twins
        self._twins = self._all_twins.setdefault((spec.precision, spec.attention), Twins())
        self._fake_copies: dict[Any, DryRun] = {} if fake_copies is None else fake_copies

    def step(
        self,
        rows: int,
        num_micro_batches: int = 1,
        later_rows: int | None = None,
        *,
        length: int | None = None,
        batch: Any = None,
    ) -> Trace:
        """Return the trace of a step; arguments and errors are those of `DryRun.run`.

        A `batch` replaces the step's own for this trace.
        """
        last, trace = self._last, None
        spec = self._spec if batch is None else replace(self._spec, batch=batch)
        self._borrow_twins()
        options: dict[str, Any] = {"recompute": self._recompute, "twins": self._twins}
        if last is not None:
            trace = last.go_on(rows, num_micro_batches, later_rows, length=length, spec=spec, **options)
        if trace is None:
            last = self._fake_copies[self._key] = DryRun(spec, state=self._state, **options)
            trace = last.run(rows, num_micro_batches, later_rows, length=length)
        return trace

    def _borrow_twins(self) -> None:
        """Try the repeated blocks found under another attention if those of this one are unknown."""
        for (precision, _), other in self._all_twins.items():
            if precision == self._spec.precision and self._twins.runs is None and other.runs:
                self._twins.borrow(other, list(blocks_of(self._spec.module).values()))

    @property
    def _last(self) -> DryRun | None:
        """The dry run whose fake copy may trace a further step."""
        return self._fake_copies.get(self._key)


def _train_all(module: nn.Module, parts: Sequence[str]) -> bool:
    """Return whether all trained parameters of `module` are those of named parts."""
    inside = {id(one) for name in parts for one in module.get_submodule(name).parameters()}
    return bool(parts) and all(id(one) in inside for one in module.parameters() if one.requires_grad)


def _size(rows: int, num_micro_batches: int, later_rows: int | None, length: int | None) -> StepSize:
    return StepSize(rows, num_micro_batches, rows if later_rows is None else later_rows, length)


def _allocations(trace: Trace) -> list[int]:
    return [event.bytes for event in trace.events if isinstance(event, Take)]
