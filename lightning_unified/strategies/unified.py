"""`Trainer(strategy="unified")`: one device, one memory budget, the batch the user asked for."""

import logging
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import BudgetError, ConfigurationError, OutOfMemoryError, PrecisionError, SplitError
from lightning_unified.hardware import (
    Budget,
    Cap,
    Figure,
    Reading,
    cap_allocator,
    capabilities,
    read,
    read_peak,
    reset_peak,
    resolve_budget,
    set_mps_environment,
)
from lightning_unified.planning import Plan, describe_bytes, describe_shortage, static_bytes
from lightning_unified.precision import PrecisionChoice, build_plugin, choose_precision, plugin_precision, verify_plugin
from lightning_unified.training.checkpoint_io import AtomicCheckpointIO
from lightning_unified.training.loop import UnifiedOptimization
from lightning_unified.training.oom import release_cached_memory
from lightning_unified.training.sizes import MicroBatchSize
from lightning_unified.training.splittability import Verdict, refuse_batch_norm
from lightning_unified.units import format_bytes

__all__ = ["UnifiedStrategy"]

log = logging.getLogger("lightning_unified")

_NEW_PEAK = 1.1  # a peak is told anew when it is a tenth higher than the one told last
_WATCH_EVERY = 8  # batches between two looks at the peak on a CPU, after as many looks at the first ones


class UnifiedStrategy(SingleDeviceStrategy):
    """Trains any LightningModule on one device inside a memory budget, with the gradients of the undivided batch.

    The batch a loader gives is the batch the optimizer sees. If it does not fit, or `micro_batch_size` says so, it runs as
    micro-batches whose losses are weighted so that gradients, logs and outputs are those of the whole; if memory runs out inside a
    step, everything the step did is undone and the step runs again in smaller parts.

    A module may define, all optional: `prepare_batch(batch)`, run once on the undivided batch, its result is what is cut and what a
    repeated step reuses; `loss_weight(batch)`, the number of terms its loss is a mean over (default: found);
    `loss_reduction = "sum"` if it divides by the whole batch's totals itself; `micro_batch_unit`, rows that stay together;
    `splittable = False`.

    What a cut batch cannot give: `training_step` and `on_before_backward` run once a micro-batch, so lists and counters that the
    module keeps of its own see the parts. With `loss_reduction = "sum"` logged means add up as the loss does; log a figure that is
    no part of the loss with its `batch_size`, or with `reduce_fx="max"` if it is the same in all parts. A metric's `compute()`
    inside `training_step` is of the part.

    A strategy object serves one Trainer.

    Args:
        budget: What this run may use: `"auto"`, `"28GiB"`, `"60%"` of the pool, or `"leave 6GiB"` for everything else.
        micro_batch_size: The largest number of rows run at once, or `"auto"`: the whole batch, and less once memory asks for it.
        recompute: Sets the module's own `recompute` attribute, where it has one; `"auto"` leaves it alone.
        precision: `"trainer"` runs what `Trainer(precision=…)` says; `"auto"` what the device does best; or Lightning's name of
            one. A name here and another at the Trainer is an error, never an override.
        recover: Repeat a step in smaller parts after an out-of-memory error.
        optimizer_rollback: Keep a copy of weights and optimizer state during each optimizer step, to go back to if memory runs
            out while it writes. Costs their bytes once more, and time.
        batch_norm: What to do when a batch must be cut and the module has BatchNorm in train mode: `"refuse"`, or accept
            statistics per `"micro"`-batch.
        check_split: Before the first cut, compare the gradients of a few rows run whole and cut, to find by what micro-batches are
            weighted, and refuse a module that cannot be cut exactly; see docs/splitting.md.

    Raises:
        ConfigurationError: If an argument is not one of those named.
    """

    strategy_name = "unified"

    def __init__(
        self,
        *,
        budget: str | int = "auto",
        micro_batch_size: int | Literal["auto"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        precision: str = "trainer",
        recover: bool = True,
        optimizer_rollback: bool = False,
        batch_norm: Literal["refuse", "micro"] = "refuse",
        check_split: bool = True,
    ) -> None:
        if recompute not in ("auto", True, False):
            raise ConfigurationError(f'recompute={recompute!r}: give true, false or "auto".')
        if batch_norm not in ("refuse", "micro"):
            raise ConfigurationError(f'batch_norm={batch_norm!r}: give "refuse" or "micro".')
        self._devices: list[torch.device] | None = None
        self._asked_precision = str(precision)
        self.precision_choice: PrecisionChoice | None = None
        super().__init__(device="cpu", checkpoint_io=AtomicCheckpointIO())
        self._budget_spec = budget
        self._recompute = recompute
        self._batch_norm = batch_norm
        self.check_split = check_split
        self._verdict: Verdict | None = None
        self._refusal: SplitError | None = None
        self._recovered = ""
        self._before_watch: tuple[int | None] | None = None
        self.sizes = MicroBatchSize(micro_batch_size)
        self._asked_size = micro_batch_size
        self.recover = recover
        self.optimizer_rollback = optimizer_rollback
        self.budget: Budget | None = None
        self.cap: Cap | None = None
        self.effective_batch_size: int | None = None
        self.recoveries = 0
        self.events: list[str] = []
        self._batches = 0
        self._earlier_peak: int | None = None
        self._peak_told = 0

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, once the Trainer has chosen it; the name is Lightning's way to hand it over."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) != 1:
            raise ConfigurationError(
                f'strategy="unified" trains on one device and was given {len(devices)}: {", ".join(map(str, devices))}; pass devices=1.'
            )
        self._devices = devices
        if devices:
            self._root_device = devices[0]
            self._resolve_precision()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin

    def _resolve_precision(self) -> None:
        """Put the gate's plugin in place of the stock one that the Trainer made from its flag."""
        given = self._precision_plugin
        flag = plugin_precision(given) if given is not None else "32-true"
        asked = self._asked_precision
        custom = given is not None and not type(given).__module__.startswith(("lightning.", "lightning_unified."))
        if asked != "trainer" and (custom or (flag not in ("32-true", asked) and asked != "auto")):
            raise PrecisionError(
                f"the strategy was given precision={asked!r} and the Trainer {type(given).__name__ if custom else repr(flag)}; give one of them."
            )
        if custom or (asked == "trainer" and not isinstance(given, MixedPrecision)):
            self.precision_choice = PrecisionChoice(precision=flag, scaler=False, reason="as the Trainer says")
            return
        follows = asked == "trainer" or (asked == "auto" and flag != "32-true")
        backend, native = self._bfloat16()
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        choice = choose_precision(
            flag if follows else asked, backend=backend, native_bf16=native, torch_version=(version[0], version[1])
        )
        self.precision_choice = choice
        self._precision_plugin = build_plugin(choice, device_type=self.root_device.type, given=given)

    def _bfloat16(self) -> tuple[str, bool]:
        found = {capability.name: capability.value for capability in capabilities(self.root_device)}
        backend = "rocm" if self.root_device.type == "cuda" and torch.version.hip else self.root_device.type
        return backend, found.get("bf16") == "native"

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "mps":
            set_mps_environment(self._budget_spec)
        super().setup_environment()
        self.budget = resolve_budget(self._budget_spec, self.reading())
        self.cap = cap_allocator(self.root_device, self.budget)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._refuse_if_too_small(module)
        self._set_recompute(module)
        super().setup(trainer)
        self._refuse_if_too_small(module)
        verify_plugin(
            self.precision_plugin,
            device_type=self.root_device.type,
            optimizers=self.optimizers,
            clips=bool(trainer.gradient_clip_val),
        )
        reset_peak(self.root_device)
        self.effective_batch_size = self._earlier_peak = None
        self._batches = self._peak_told = 0
        self._verdict = self._refusal = self._before_watch = None
        self.sizes.keep_together(getattr(module, "micro_batch_unit", 1), whose=type(module).__name__)
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress
        loop.automatic_optimization = UnifiedOptimization(trainer, self)
        loop.automatic_optimization.optim_progress = progress

    def reading(self) -> Reading:
        """Return what the device's pool says now; never waits for the device."""
        return read(self.root_device)

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of an effective batch that go through forward and backward at once; None before the first batch is done."""
        return None if self.effective_batch_size is None else self.sizes.at_once(self.effective_batch_size)

    @property
    def plan(self) -> Plan:
        """What was decided, and why, as far as it is known by now."""
        assert self.budget is not None, "the plan exists once fit has begun"
        size_reason = "as asked" if self._asked_size != "auto" else "the whole batch"
        if self.recoveries:
            size_reason = f"{size_reason}, then smaller: {self._recovered}"
        choice = self.precision_choice
        return Plan(
            micro_batch_size=self.micro_batch_size,
            recompute=None if self._recompute == "auto" else bool(self._recompute),
            precision=plugin_precision(self.precision_plugin),
            budget_bytes=self.budget.bytes,
            reasons={
                "budget": self.budget.reason,
                "micro_batch_size": size_reason,
                "recompute": "as asked" if self._recompute != "auto" else "as the module is",
                "precision": choice.reason if choice is not None else "Lightning's default",
                "loss_weight": self._weighting_reason(),
                "cap": self.cap.reason if self.cap is not None else "none",
            },
        )

    def _refuse_if_too_small(self, module: L.LightningModule) -> None:
        assert self.budget is not None
        need = static_bytes(module, self.optimizers)
        if sum(need.values()) > self.budget.bytes:
            raise BudgetError(
                f"a budget of {format_bytes(self.budget.bytes)} ({self.budget.spec}) cannot hold {type(module).__name__}: {describe_bytes(need)}, "
                f"before any activation. Give a budget well above {format_bytes(sum(need.values()))}, or train a smaller model."
            )

    def _set_recompute(self, module: L.LightningModule) -> None:
        if self._recompute == "auto":
            return
        if not hasattr(module, "recompute"):
            raise ConfigurationError(
                f"recompute={self._recompute} was asked for, and {type(module).__name__} has no `recompute` attribute to set; "
                'add one that its forward reads, or leave recompute="auto".'
            )
        module.recompute = self._recompute  # type: ignore[assignment]

    def allow_split(self, rows: int) -> None:
        """Raise `SplitError` if the module says, or shows, that its batch of `rows` cannot be cut exactly."""
        module = self.lightning_module
        assert module is not None
        name = type(module).__name__
        if self._refusal is not None:
            raise self._refusal
        if getattr(module, "splittable", True) is False:
            raise SplitError(
                f"{name}.splittable is False and its batch of {rows} rows must run in parts of {self.sizes.limit}; "
                "raise the budget or the micro-batch size, or use a smaller batch."
            )
        if self._batch_norm == "refuse":
            refuse_batch_norm(module, rows=rows)

    def split_checked(self, verdict: Verdict) -> None:
        """Note by what micro-batches are weighted; say so where the module did not, or where it could not be checked."""
        if verdict is self._verdict:
            return
        if not verdict.conclusive and (self._verdict is None or self._verdict.conclusive):
            log.warning("Micro-batches are weighted by %s.", verdict.reason)
        if not verdict.conclusive or verdict.count is not None:
            self.events.append(f"micro-batches weighted by {verdict.reason}")
        self._verdict = verdict

    def _weighting_reason(self) -> str:
        if self._verdict is not None:
            return self._verdict.reason
        return "no batch has been cut" if self.check_split else "as declared, else rows; unchecked (check_split=False)"

    def runs_whole(self, refusal: SplitError) -> bool:
        """Return whether a batch that may not be cut runs whole: if only the watch over the budget wanted it smaller."""
        if self._before_watch is None:
            return False
        (self.sizes.limit,), self._refusal, self._before_watch = self._before_watch, refusal, None
        self.events.append("its batches cannot be cut exactly, so it goes on with them whole")
        log.warning("%s %s", refusal, self.events[-1])
        return True

    def backward_part(self, loss: Tensor, optimizer: Optimizer, share: float | None) -> Tensor:
        """Run one micro-batch's backward: `Strategy.backward` (Lightning 2.6.6) without what follows the batch's last.

        `on_before_backward` sees the micro-batch's own loss, so that what it logs averages to the batch's; what is
        differentiated is the loss's `share` of the batch.
        """
        assert self.lightning_module is not None
        self.pre_backward(loss)
        scaled = self.precision_plugin.pre_backward(loss, self.lightning_module)
        if share is not None:
            scaled = scaled * share
        self.precision_plugin.backward(scaled, self.lightning_module, optimizer)
        return scaled

    def after_backward(self, loss: Tensor) -> None:
        """Run what follows the last backward of a batch: hooks see its gradients once, and whole."""
        assert self.lightning_module is not None
        self.post_backward(self.precision_plugin.post_backward(loss, self.lightning_module))

    def out_of_memory(self, *, phase: str, reason: str, rows: int | None, attempt: int) -> None:
        """Free memory and choose a smaller size for the batch that failed.

        Raises:
            OutOfMemoryError: If the smallest unit of rows has failed already.
        """
        release_cached_memory(self.root_device)
        failed = None if rows is None else self.sizes.at_once(rows)
        shrunk = failed is not None and self.sizes.shrink(failed)
        if not shrunk and (phase != "optimizer step" or attempt > 1):
            assert self.lightning_module is not None
            assert self.budget is not None
            need = static_bytes(self.lightning_module, self.optimizers)
            raise OutOfMemoryError(
                describe_shortage(need, budget_bytes=self.budget.bytes, phase=phase, reason=reason, rows=failed)
            )
        self.recoveries += 1
        what_next = f"with {self.sizes.limit} at once" if shrunk else "after clearing caches"
        self._recovered = f"out of memory in {phase} with {failed} rows at once; repeated {what_next}"
        self._before_watch = None
        self.events.append(self._recovered)
        log.warning(
            "Memory ran out in %s with %s rows at once (%s). The step is repeated %s.", phase, failed, reason, what_next
        )

    def batch_done(self, rows: int | None) -> None:
        """Note the batch, and on a CPU, whose allocator has no cap, whether the process has outgrown the budget."""
        if rows is not None:
            self.effective_batch_size = max(rows, self.effective_batch_size or 0)
        self._batches += 1
        if self.root_device.type == "cpu" and (self._batches <= _WATCH_EVERY or self._batches % _WATCH_EVERY == 0):
            self._shrink_if_over_budget()

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and which counter says so."""
        now = read_peak(self.root_device)
        if now.bytes is None or self._earlier_peak is None or now.bytes >= self._earlier_peak:
            return now
        return Figure(self._earlier_peak, now.source)

    def _shrink_if_over_budget(self) -> None:
        """Halve the size once for each new peak above the budget; the peak then counts anew."""
        assert self.budget is not None
        peak, size = read_peak(self.root_device).bytes, self.micro_batch_size
        if peak is None or size is None or peak <= max(self.budget.bytes, _NEW_PEAK * self._peak_told):
            return
        self._earlier_peak = max(peak, self._earlier_peak or 0)
        shrunk = self.shrink(f"peak {format_bytes(peak)} above the budget of {format_bytes(self.budget.bytes)}")
        self._peak_told = 0 if shrunk and reset_peak(self.root_device) else peak

    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch from the next batch on, before memory runs out.

        Args:
            reason: Why, for people.

        Returns:
            Whether it could be done: not before the first batch, below the smallest unit, or where a batch cannot be cut exactly.
        """
        size, shrunk = self.micro_batch_size, False
        try:
            if size is None:
                what_next = "no batch that can be cut has run yet"
            else:
                self.allow_split(size)
                before, shrunk = self.sizes.limit, self.sizes.shrink(size)
                if self._verdict is None and shrunk and self._before_watch is None:
                    self._before_watch = (before,)
                what_next = (
                    f"micro-batches of {self.sizes.limit} rows from here on" if shrunk else "nothing left to shrink"
                )
        except SplitError:  # memory has not run out: a batch that cannot be cut exactly goes on whole
            what_next = "its batches cannot be cut exactly, so it goes on with them whole"
        self.events.append(f"{reason}; {what_next}")
        log.warning("%s", self.events[-1])
        return shrunk
