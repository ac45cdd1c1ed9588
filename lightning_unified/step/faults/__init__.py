"""Detection of GPU faults that raise nothing, on Metal.

Metal runs work in command buffers. It aborts a buffer that runs for too long while a display is in use, that runs out of memory or that
faults. torch (2.13) waits for the buffer and never reads its status (pytorch pull request 193571), so the step goes on with what the
memory held before. MLX raises in the same place (mlx issue 3267). **Nothing in this package has run on hardware.**

| module | subject |
|---|---|
| canary | marks that a step counts on the device, in the same stream as its work |
| standard_error | the runtime's own message, written to file descriptor 2 |
| watch | both together: the work lost since the last look |
"""

from lightning_unified.step.faults.watch import FaultWatch

__all__ = ["FaultWatch"]
