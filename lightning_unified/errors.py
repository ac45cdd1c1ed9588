"""The errors this package raises of its own, as one tree.

    LightningUnifiedError
    ├── ConfigurationError     what was asked makes no sense; nothing was started      (exit code 2)
    │   ├── BudgetError            a memory budget that cannot be
    │   ├── HardwareError          hardware that is not here
    │   ├── PrecisionError         a precision that this device, torch or scaler cannot give
    │   └── SplitError             a batch or a module that cannot be cut into micro-batches
    └── RunError               the run failed                                          (exit code 1)
        ├── OutOfMemoryError       the smallest unit of work does not fit
        ├── HalfUpdatedError       memory ran out while the optimizer was writing weights
        ├── RankError              another rank failed, is gone, or came to another point of the run
        ├── HostFrozenError        a simulated machine would hang here
        ├── GradientError          gradients were not finite for too long
        ├── DryRunError         a step cannot be run without values, so that nothing can be told of it before it runs
        └── CheckpointError        a checkpoint cannot be read or written

A message says what was given, what is allowed and what to do.
"""

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigurationError",
    "DryRunError",
    "GradientError",
    "HalfUpdatedError",
    "HardwareError",
    "HostFrozenError",
    "LightningUnifiedError",
    "OutOfMemoryError",
    "PrecisionError",
    "RankError",
    "RunError",
    "SplitError",
]


class LightningUnifiedError(Exception):
    """The root of the tree; `exit_code` is what the command line returns for it."""

    exit_code = 1


class ConfigurationError(LightningUnifiedError, ValueError):
    """What was asked makes no sense; nothing was started."""

    exit_code = 2


class BudgetError(ConfigurationError):
    """A memory budget that cannot be read or cannot be had."""


class HardwareError(ConfigurationError):
    """Hardware was asked for that is not here."""


class PrecisionError(ConfigurationError):
    """A precision that this device, torch version, optimizer or scaler cannot give."""


class SplitError(ConfigurationError):
    """A batch or a module that cannot be cut into micro-batches."""


class RunError(LightningUnifiedError, RuntimeError):
    """The run failed after it had started."""


class OutOfMemoryError(RunError):
    """The smallest unit of work does not fit into the memory there is."""


class HalfUpdatedError(RunError):
    """Memory ran out while the optimizer was writing weights, and no copy was kept to go back to."""


class RankError(RunError):
    """Another rank failed, is gone, or came to another point of the run, so that this one cannot go on."""


class HostFrozenError(RunError):
    """A simulated machine would hang here: it has one pool, no cap, and does not raise when the pool is used up."""


class GradientError(RunError):
    """Gradients held NaN or Inf for more optimizer steps in a row than allowed."""


class DryRunError(RunError):
    """A training step cannot be run without values; what it needs must be measured on the device."""


class CheckpointError(RunError):
    """A checkpoint cannot be read or written."""
