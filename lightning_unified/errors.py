"""The errors of this package, as one tree.

    LightningUnifiedError
    ├── ConfigurationError     the request is invalid; nothing was started             (exit code 2)
    │   ├── BudgetError            a memory budget that is unreadable or unavailable
    │   ├── HardwareError          hardware that is not present
    │   ├── PrecisionError         a precision that this device, torch or scaler does not support
    │   └── SplitError             a batch or a module that cannot be split into micro-batches
    └── RunError               the run failed                                          (exit code 1)
        ├── OutOfMemoryError       the smallest unit of work does not fit
        ├── HalfUpdatedError       memory ran out while the optimizer was writing weights
        ├── GpuFaultError          the GPU lost work of a step, and the run cannot go on exactly
        ├── UndoError              a step changed state that cannot be restored
        ├── RecomputationError     a block's second run, in the backward pass, differs from its first
        ├── RankError              another rank failed, is gone, or is at another point of the run
        ├── HostFrozenError        a simulated machine would hang here
        ├── GradientError          gradients were not finite for too long
        ├── DryRunError            a dry run of the step is impossible, so its memory cannot be predicted
        └── CheckpointError        a checkpoint cannot be read or written

A message states what was given, what is allowed and what to do.
"""

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigurationError",
    "DryRunError",
    "GpuFaultError",
    "GradientError",
    "HalfUpdatedError",
    "HardwareError",
    "HostFrozenError",
    "LightningUnifiedError",
    "OutOfMemoryError",
    "PrecisionError",
    "RankError",
    "RecomputationError",
    "RunError",
    "SplitError",
    "UndoError",
]


class LightningUnifiedError(Exception):
    """Root of the error tree; the command line returns its `exit_code`."""

    exit_code = 1


class ConfigurationError(LightningUnifiedError, ValueError):
    """The request is invalid; nothing was started."""

    exit_code = 2


class BudgetError(ConfigurationError):
    """A memory budget is unreadable or unavailable."""


class HardwareError(ConfigurationError):
    """The requested hardware is not present."""


class PrecisionError(ConfigurationError):
    """This device, torch version, optimizer or scaler does not support the precision."""


class SplitError(ConfigurationError):
    """A batch or a module cannot be split into micro-batches.

    Args:
        text: What cannot be split, and the ways out.
        is_final: Whether the batch cannot run whole either, because a check of its step has written the weights.
        is_for_rules: Whether another way to weight micro-batches than those that were tried may split the batch.
        is_of_rows: Whether the step failed on some rows of the batch.
        may_be_rounding: Whether gradients in float32 differ so little that their rounding may explain it.
    """

    def __init__(
        self,
        text: str = "",
        *,
        is_final: bool = False,
        is_for_rules: bool = False,
        is_of_rows: bool = False,
        may_be_rounding: bool = False,
    ) -> None:
        super().__init__(text)
        self.is_final, self.is_for_rules, self.is_of_rows = is_final, is_for_rules, is_of_rows
        self.may_be_rounding = may_be_rounding


class RunError(LightningUnifiedError, RuntimeError):
    """The run failed after it had started."""


class OutOfMemoryError(RunError):
    """The smallest unit of work does not fit into memory."""


class HalfUpdatedError(RunError):
    """Memory ran out while the optimizer was writing weights, and no copy exists to restore."""


class GpuFaultError(RunError):
    """The GPU lost work without an error, and repeating the step cannot repair it.

    Either the fault persists, or a repetition would not be exact.
    """


class UndoError(RunError):
    """A step that must be undone changed state that cannot be restored.

    Training cannot continue exactly.
    """


class RecomputationError(RunError):
    """Activation checkpointing ran a block again, and it computed other values than before.

    Args:
        text: Which block, and how its runs differ.
        kind: The class of the block; None if unknown.
    """

    def __init__(self, text: str = "", *, kind: object = None) -> None:
        super().__init__(text)
        self.kind = kind


class RankError(RunError):
    """Another rank failed, is gone, or is at another point of the run, so this rank cannot continue.

    Args:
        text: What happened.
        failed: Ranks that reported an error of their own.
        missing: Ranks that do not answer.
    """

    def __init__(self, text: str = "", *, failed: tuple[int, ...] = (), missing: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.failed, self.missing = failed, missing


class HostFrozenError(RunError):
    """A simulated machine would hang here: it has one pool, no cap, and no out-of-memory error."""


class GradientError(RunError):
    """Gradients held NaN or Inf for more optimizer steps in a row than allowed."""


class DryRunError(RunError):
    """A training step cannot run without values; its memory must be measured on the device."""


class CheckpointError(RunError):
    """A checkpoint cannot be read or written."""


def check_count(name: str, given: object) -> None:
    """Raise `ConfigurationError` if a setting is no whole number of 1 or more."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigurationError(f"{name}={given!r}: give a whole number, 1 or more.")
