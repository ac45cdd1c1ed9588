"""`Trainer(strategy="unified")`: any batch size on one device, inside a memory budget."""

import os
from typing import Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.strategies.base import UnifiedBase, options_among

__all__ = ["UnifiedStrategy"]


class UnifiedStrategy(UnifiedBase, SingleDeviceStrategy):
    """Trains any LightningModule on one device in a memory budget, with whole-batch gradients.

    The optimizer sees the loader's batch. A batch that does not fit, or exceeds `micro_batch_size`, runs as micro-batches. Their losses
    are weighted so that gradients, logs and outputs are those of the whole batch. If memory runs out inside a step, the strategy undoes
    the step and repeats it in smaller micro-batches.

    A module needs no change if its loss is a mean over rows or over scored labels. Any other module describes its batches in the hook
    `configure_micro_batches(stage) -> MicroBatchRules`. For a module you do not own, pass the same rules as `micro_batches`. A module
    that does not split exactly is refused with `SplitError`. Validation, test and predict steps are split only after memory has run out
    in one. docs/reference/micro_batches.md has an example of each rule.

    A module may also have `kept_bytes` and `give_back()`, for memory that it keeps on the device between steps while the strategy has
    `spare_bytes`.

    Attributes, lists and buffers that a step writes end as after the whole batch, or the batch is refused. A metric's `compute()` inside
    `training_step` is that of a micro-batch.

    A strategy object serves one Trainer.

    Args:
        budget: The memory this run may use: `"auto"`, `"28GiB"`, `"60%"` of the pool, or `"leave 6GiB"` for everything else. A
            `leave` budget is read again while running, so that it follows other programs.
        micro_batch_size: The largest number of rows run at once, or `"auto"`: the whole batch, and less if memory requires it.
        recompute: Activation checkpointing: True, False or `"auto"`; see docs/explanation/recomputation.md. True sets the attribute
            `recompute` that the module's class declares, or else checkpoints its blocks. `"auto"` leaves the module as it is until a plan says otherwise, or memory runs
            out and no smaller micro-batch is left.
        compile: Compile parts of the module with `torch.compile` during the fit: `"blocks"`, the repeated blocks; `"whole"`, the module's
            children; False, nothing. `"auto"` compiles the blocks if the run is long enough to save three times the seconds that
            compilation takes. Modules that the user compiled are planned and trained as they are. Compiled code rounds differently and
            draws other dropout noise.
        precision: `"trainer"` runs `Trainer(precision=…)`; `"auto"` the best precision of the device; or Lightning's name of one.
            Different names here and at the Trainer are an error.
        optimizer_kernel: `"keep"` leaves optimizers as they were built. `"fused"`, `"foreach"` or `"for-loop"` sets the kernel of
            torch's own optimizers. `"auto"` lets the plan choose for optimizers built without a choice. Updates differ in rounding.
            The memory beside the optimizer state differs by up to the parameters' bytes.
        loss_chunk: Rows of logits that the loss computes at one time, `"auto"` or False; see docs/how-to/large-vocabulary.md. It acts on
            Hugging Face models, without a change to them, and on modules with `loss_chunk_rows`. `"auto"` leaves the module as it is
            unless a plan needs the memory. False never changes it.
        attention: `"torch"` leaves attention as it is. `"chunked"` computes it in chunks of queries for the fit, exactly and without the matrix
            of all scores; see docs/how-to/attention.md. `"auto"` lets the plan choose on MPS, where training saves that matrix, and keeps
            torch's attention elsewhere.
        predict: Trace the step before the first batch runs, and choose sizes and memory options by its predicted memory; see
            docs/explanation/planner/planning.md. It takes a few seconds, and is skipped if the budget is thousands of times the bytes of weights and batch.
        recover: Undo a step that ran out of memory, and repeat it in smaller micro-batches.
        optimizer_rollback: Keep a copy of weights and optimizer state during each optimizer step, to restore if memory runs out while
            it writes. Costs their bytes once more, and time.
        micro_batches: Rules for splitting batches, for a module you do not own. They replace all that the module's
            `configure_micro_batches` returns. Worker processes get them only if they can be pickled.
        batch_norm: The reaction when a batch must be split and the module runs BatchNorm in train mode: `"refuse"`, or `"micro"` to accept
            statistics of each micro-batch. `MicroBatchRules(batch_norm=…)` takes precedence.
        check_split: Whether the exactness check compares rows run whole and split: before the first split batch, again at growing
            intervals, and before the update of a batch that differs in kind. It finds how losses are weighted and how results
            merge, and refuses a module that does not split exactly. `MicroBatchRules(check=…)` takes precedence; see docs/explanation/exactness.md.
        detect_faults: Check each step for work that a Mac's GPU lost without an error, and repeat it; see docs/explanation/recovery.md. It has
            no effect on other devices. The host waits for the GPU once a batch. Not run on hardware.
        evaluation_micro_batch_size: The largest number of rows run at once in validation, test and predict, or `"auto"`: the whole
            batch, and less once memory runs out in one. Figures logged and returned are those of the whole batch.
        window_mean: The gradient of an accumulation window is a mean over its `"batches"`, as in Lightning, or over the loss
            `"terms"` in them (rows, or scored tokens). With `"terms"` a window trains as one batch of all its rows would, the last
            window too.
        remember: File for the sizes found, such as `runs/mine/sizes.json`. A resumed run, or another run in a directory beside it with
            the same module, device and budget, starts with them.
        simulate: The name of a machine that is not here, such as `"m2-16gb"`. The CPU trains with the budget, readings, limits and
            out-of-memory errors of that machine; see docs/reference/simulation.md.

    Raises:
        ConfigurationError: If an argument has a value that is not allowed.
    """

    strategy_name = "unified"

    def __init__(
        self,
        *,
        budget: str | int = "auto",
        micro_batch_size: int | Literal["auto"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        compile: Literal["auto", "blocks", "whole", False] = False,  # noqa: A002
        precision: str = "trainer",
        optimizer_kernel: Literal["keep", "auto", "fused", "foreach", "for-loop"] = "keep",
        loss_chunk: int | Literal["auto", False] = "auto",
        attention: Literal["auto", "chunked", "torch"] = "auto",
        predict: bool = True,
        recover: bool = True,
        optimizer_rollback: bool = False,
        micro_batches: MicroBatchRules | None = None,
        batch_norm: Literal["refuse", "micro"] = "refuse",
        check_split: bool = True,
        detect_faults: bool = True,
        evaluation_micro_batch_size: int | Literal["auto"] = "auto",
        window_mean: Literal["batches", "terms"] = "batches",
        remember: str | None = None,
        simulate: str | None = None,
    ) -> None:
        self._devices: list[torch.device] | None = None
        options = options_among(locals())
        machine = None if simulate is None else SimulatedMachine(simulate, environ=os.environ)
        self._use(MemoryPolicy(options, BudgetWatch(budget, machine)))
        super().__init__(device="cpu")

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, once the Trainer has chosen it. Lightning sets it under this name."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) != 1:
            raise ConfigurationError(
                f'strategy="unified" trains on one device and was given {len(devices)}: {", ".join(map(str, devices))}; pass devices=1, '
                'or strategy="unified_ddp" to train on all of them.'
            )
        self._devices = devices
        if devices and self.simulated is not None and devices[0].type != "cpu":
            raise ConfigurationError(
                f'simulate={self.simulated.profile.name} trains on the CPU and was given {devices[0]}; pass accelerator="cpu", or leave '
                "simulate out."
            )
        if devices:
            self._root_device = devices[0]
            self._resolve_precision()
