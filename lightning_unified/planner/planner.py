"""What one step of a module needs, and the best way to run it: dry runs, numbers and search brought together."""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lightning_unified.cost_model.even_splits import cuts
from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.reserve import reserved_bytes
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.calibration import Calibration, kind_of
from lightning_unified.cost_model.rates.cost import step_seconds
from lightning_unified.cost_model.search import Candidate, Choice, Option, search
from lightning_unified.cost_model.summary import summarise
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.planner.adjusted_trace import told
from lightning_unified.planner.bounds import Bounds
from lightning_unified.planner.dry_run import DryRuns
from lightning_unified.planner.setting import Setting
from lightning_unified.planner.traced_sizes import TracedSizes
from lightning_unified.step.split import splitter_of, tensors_in
from lightning_unified.step.split.rules import given_to, rules_of

__all__ = ["Planner"]

_LONGEST = 4.0  # seconds after which no further setting is looked at but the one that needs least
_ATTEMPTS = 3  # searches, each without the lines that the one before was misled by


class Planner:
    """Predicts and chooses for one module and one batch on one backend; what was traced once is kept.

    Args:
        module: The module, which is not touched; its weights may be on any device, the meta device too.
        batch: A whole batch, as the loader gives it or prepared.
        is_prepared: Whether it is what the rule `prepare` returned; else a dry run prepares it.
        backend: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`, here or not.
        trainer: The Trainer that it is about, with its callbacks, clipping and windows; None for a plain one.
        rates: The speeds of the machine; None predicts no times, and `choose` then needs some.
        unit: Rows that stay together; None for what the module says. All of them for a batch that cannot be cut.
        least: Rows that every micro-batch needs.
        most: The largest micro-batch that is allowed.
        updates: Whether the step writes weights; else what its optimizer takes is left out.
        workspaces: Whether what the backend's libraries take for themselves is counted; a simulated machine has none.
        reduction_bytes: What the device holds all the while to average gradients over ranks; counted as a workspace.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Attributes:
        rows: Of the batch; 1 for one that has no rows to count.
    """

    def __init__(
        self,
        module: L.LightningModule,
        batch: Any,
        *,
        is_prepared: bool = False,
        backend: str,
        trainer: L.Trainer | None = None,
        rates: Rates | None = None,
        calibration: Calibration | None = None,
        unit: int | None = None,
        least: int = 1,
        most: int | None = None,
        updates: bool = True,
        workspaces: bool = True,
        reduction_bytes: int = 0,
        mmap_threshold: int | None = None,
    ) -> None:
        rules = rules_of(module, "fit", given=given_to(trainer))
        splitter = splitter_of(module, "fit", trainer=trainer)
        shape = splitter.shape(batch)
        whole = shape is None or not rules.splittable or splitter.refusal(batch, shape.rows) is not None
        self.rows = 1 if shape is None else shape.rows
        self.backend = backend
        self._rates, self._calibration = rates, calibration
        self._module = module
        self._unit = self.rows if whole else unit or rules.unit
        self._least, self._most = least, most
        self._has_encoders = bool(rules.encoders)
        self._row_bytes = sum(one.numel() * one.element_size() for one in tensors_in(batch)) // self.rows
        self._dry_runs = partial(
            DryRuns, module, batch, is_prepared=is_prepared, backend=backend, trainer=trainer, fake_copies={}
        )
        self._updates, self._workspaces, self._reduction_bytes = updates, workspaces, reduction_bytes
        self._mmap_threshold = mmap_threshold
        self._sizes: dict[Setting, TracedSizes] = {}
        self._settings: dict[tuple[Any, ...], Setting] = {}
        self._begun = time.monotonic()
        self._ways = cuts(self.rows, unit=self._unit, least=least, most=most)

    def predict(self, setting: Setting, *, micro_batch_size: int | None = None) -> Prediction:
        """Return what a step takes under `setting`, traced at exactly that size.

        Args:
            setting: How the memory options are set.
            micro_batch_size: Rows at once; None for the whole batch.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        self._begun = time.monotonic()
        trace, parts = self._exactly(setting, micro_batch_size)
        return self._summary(trace, parts=parts)

    def fits(self, setting: Setting, *, micro_batch_size: int | None, limit: int) -> bool:
        """Return whether a step goes through within `limit` bytes, corrected by what was measured of its kind.

        Args:
            setting: As in `predict`.
            micro_batch_size: As in `predict`.
            limit: Of what the machine gives.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        return self._goes_through(self._exactly(setting, micro_batch_size)[0], limit=limit)

    def choose(
        self, settings: Sequence[Setting], *, budget_bytes: int, rates: Rates, only_best: bool = False
    ) -> Choice:
        """Return the setting and size of least predicted time that fits; a size below the whole batch is traced as it is to run.

        Args:
            settings: From which to choose, the user's own first, the one that needs least next.
            budget_bytes: What the run may use.
            rates: The speeds of the machine.
            only_best: Whether settings are traced only if they can win, by what the user's own setting tells of them: the choice is
                the same and made in less time, and tells fewer alternatives.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        self._begun, self._rates = time.monotonic(), rates
        for _ in range(_ATTEMPTS):
            options = self._promising(settings, rates=rates) if only_best else self._options(settings)
            choice = self._searched(options, settings[0], budget_bytes=budget_bytes, rates=rates)
            best = choice.best
            if best is None or best.parts == 1:
                break
            sizes = self._of(self.setting_of(best))
            if self._goes_through(sizes.exactly(best.micro_batch_size, parts=best.parts), limit=budget_bytes):
                break
            sizes.distrust_lines()
        return choice  # pyright: ignore[reportPossiblyUnboundVariable]

    def _searched(self, options: Iterator[Option], own: Setting, *, budget_bytes: int, rates: Rates) -> Choice:
        return search(
            options,
            budget_bytes=budget_bytes,
            reserve=partial(self._needed, limit=budget_bytes),
            rows=self.rows,
            unit=self._unit,
            least=self._least,
            most=self._most,
            rates=rates,
            alignment=None if self._calibration is None else self._calibration.alignment,
            own=self._option(own),
        )

    def setting_of(self, candidate: Candidate) -> Setting:
        """Return the setting that a candidate of `choose` was found under."""
        return self._settings[_key(candidate)]

    def prediction_of(self, candidate: Candidate) -> Prediction:
        """Return what a step takes under a candidate of `choose`."""
        trace = self._of(self.setting_of(candidate)).at(candidate.micro_batch_size, parts=candidate.parts)
        return replace(self._summary(trace, parts=candidate.parts), seconds=candidate.seconds)

    def could_be_aligned(self, choice: Choice) -> bool:
        """Return whether the choice cuts the batch into sizes that are no multiples of what may pay, and others are."""
        best = choice.best
        if best is None or best.parts == 1:
            return False
        length = self._of(self.setting_of(best)).at(best.micro_batch_size, parts=best.parts).length or 1
        coarse, fine = (multiple // math.gcd(multiple, length) for multiple in (64, 8))
        ways = {len(way): way for way in self._ways}
        unaligned = any(rows % coarse for rows in ways.pop(best.parts))
        return unaligned and any(
            parts > best.parts and not any(rows % fine for rows in way) for parts, way in ways.items()
        )

    def kind(self, setting: Setting) -> str:
        """Return under what name predictions of this kind are corrected by what was measured."""
        recomputes = setting.recompute is not None and setting.recompute.blocks != 0
        return kind_of(backend=self.backend, precision=setting.precision, recomputes=recomputes)

    def _options(self, settings: Sequence[Setting]) -> Iterator[Option]:
        for index, setting in enumerate(settings):
            if index > 1 and time.monotonic() - self._begun > _LONGEST:
                return
            yield self._option(setting)

    def _promising(self, settings: Sequence[Setting], *, rates: Rates) -> Iterator[Option]:
        """Yield settings and ways to cut by the time that they promise, told from the user's own step."""
        bounds = self._bounds(settings[0])
        least = [bounds.seconds(setting, rates=rates) for setting in settings]
        options = [
            self._option(setting, least=tells, bounds=bounds) for setting, tells in zip(settings, least, strict=True)
        ]
        waiting = [(tells(len(self._ways[0])), index, 0) for index, tells in enumerate(least)]
        heapq.heapify(waiting)
        while waiting:
            _, index, way = heapq.heappop(waiting)
            if index > 1 and time.monotonic() - self._begun > _LONGEST:
                continue
            yield replace(options[index], way=self._ways[way])
            if way + 1 < len(self._ways):
                heapq.heappush(waiting, (least[index](len(self._ways[way + 1])), index, way + 1))

    def _bounds(self, own: Setting) -> Bounds:
        rows, parts = self._fewest[0], len(self._fewest)
        return Bounds(self._module, own, lambda: self._of(own).at(rows, parts=parts), sizes=self._fewest)

    def _option(
        self, setting: Setting, *, least: Callable[[int], float] | None = None, bounds: Bounds | None = None
    ) -> Option:
        own = None if bounds is None or bounds.own == setting else bounds.own
        option = Option(
            lines=self._of(setting, bounds=bounds),
            recompute="none" if setting.recompute is None else str(setting.recompute),
            again=setting.again,
            precision=setting.precision,
            optimizer_kernel=setting.optimizer_kernel,
            loss_chunk=setting.loss_chunk,
            changes=setting.changes,
            least_seconds=least,
            no_faster_than=None if own is None or setting.loss_chunk == own.loss_chunk else self._of(own),
        )
        self._settings[_key(option)] = setting
        return option

    @property
    def _fewest(self) -> tuple[int, ...]:
        """The rows of each micro-batch where there are as few as may be."""
        return self._ways[0]

    def _of(self, setting: Setting, *, bounds: Bounds | None = None) -> TracedSizes:
        if setting not in self._sizes:
            self._sizes[setting] = TracedSizes(
                self._steps(setting),
                rows=self.rows,
                unit=self._unit,
                row_bytes=self._row_bytes,
                workspaces=self._workspaces,
                least=None if bounds is None else bounds.bytes(setting),
                holds_batch=self._has_encoders,
            )
        return self._sizes[setting]

    def _exactly(self, setting: Setting, micro_batch_size: int | None) -> tuple[Trace, int]:
        rows = min(micro_batch_size or self.rows, self.rows)
        parts = -(-self.rows // rows)
        return self._of(setting).exactly(rows, parts=parts), parts

    def _steps(self, setting: Setting) -> Callable[[int, int, int], Trace]:
        step = self._dry_runs(
            precision=setting.precision,
            recompute=setting.recompute,
            optimizer_kernel=setting.optimizer_kernel,
            loss_chunk=setting.loss_chunk,
        ).step
        return partial(told, step, updates=self._updates, reduction_bytes=self._reduction_bytes)

    def _needed(self, trace: Trace, *, limit: int) -> int:
        """Return what a step takes of the machine, of which an allocator that comes to its limit gives back what it can."""
        taken = reserved_bytes(trace, mmap_threshold=self._mmap_threshold)
        reserved = int(taken * self._factor(trace))
        return min(reserved, limit) if reserved <= limit or self._goes_through(trace, limit=limit) else reserved

    def _goes_through(self, trace: Trace, *, limit: int) -> bool:
        return fits_within(trace, int(limit / self._factor(trace)), mmap_threshold=self._mmap_threshold)

    def _factor(self, trace: Trace) -> float:
        if self._calibration is None:
            return 1.0
        return self._calibration.peak_factor(_kind(trace))

    def _summary(self, trace: Trace, *, parts: int) -> Prediction:
        seconds = None if self._rates is None else step_seconds(trace, self._rates)
        found = summarise(
            trace,
            seconds=seconds if parts <= 2 else None,
            planning_seconds=time.monotonic() - self._begun,
            mmap_threshold=self._mmap_threshold,
        )
        return replace(found, parts=parts)


def _key(one: Candidate | Option) -> tuple[Any, ...]:
    return one.recompute, one.precision, one.optimizer_kernel, one.loss_chunk


def _kind(trace: Trace) -> str:
    recompute = trace.options.get("recompute", "none")
    return kind_of(backend=trace.backend, precision=trace.options.get("precision", ""), recomputes=recompute != "none")
