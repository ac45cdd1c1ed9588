"""Requeue a SLURM job that its scheduler is about to end."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_unified.errors import ConfigurationError
from lightning_unified.terminal import say

__all__ = ["Requeue", "requeue_of", "signal_named"]

_LIMIT_S = 60.0  # for scontrol, which asks the controller over the network
_JOB = re.compile(r"\d+(_\d+)?")


def _run(command: Sequence[str]) -> int:
    """Run `command` and return its exit code; the command's own lines go to standard error."""
    return subprocess.run(command, check=False, timeout=_LIMIT_S, stdout=2).returncode


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeue:
    """The way back into SLURM's queue.

    Args:
        signal: The signal by which SLURM announces the end of the job (`#SBATCH --signal=SIGUSR1@90`).
        job: The job's id; `<array>_<task>` for a task of an array.
        run: Runs a command and returns its exit code.
    """

    signal: signal.Signals
    job: str
    run: Callable[[Sequence[str]], int] = _run

    def ask(self) -> str | None:
        """Requeue the job; return in words why it was not, or None."""
        command = ["scontrol", "requeue", self.job]
        try:
            code = self.run(command)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{' '.join(command)}: {error}"
        return None if code == 0 else f"{' '.join(command)} ended with exit code {code}"

    def ask_on_rank_0(self, trainer: Trainer) -> bool:
        """Requeue the job from rank 0, say the outcome, and return on all ranks whether it worked."""
        failure = self.ask() if trainer.is_global_zero else None
        failure = trainer.strategy.broadcast(failure) if trainer.world_size > 1 else failure
        if trainer.is_global_zero:
            say(f"SLURM job {self.job} is {'requeued.' if failure is None else f'not requeued: {failure}'}")
        return failure is None


def requeue_of(environment: Any, asked: str | None, environ: Mapping[str, str] = os.environ) -> Requeue | None:
    """Return how this job is requeued; None outside of SLURM, and where the job is not to be requeued.

    Args:
        environment: The cluster environment of the strategy; None asks SLURM's variables.
        asked: The name of the signal; None takes that of the Trainer's `SLURMEnvironment`, by default SIGUSR1.
        environ: The variables of the process.
    """
    if environment is None and SLURMEnvironment.detect():
        environment = SLURMEnvironment()
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    array = environ.get("SLURM_ARRAY_JOB_ID")
    job = environ.get("SLURM_JOB_ID", "") if array is None else f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    number = environment.requeue_signal if asked is None else signal_named(asked)
    return Requeue(signal=signal.Signals(number), job=job) if _JOB.fullmatch(job) and number is not None else None


def signal_named(name: str) -> signal.Signals:
    """Return the signal called `name`.

    Raises:
        ConfigurationError: If there is none of that name, or if it cannot be handled.
    """
    found = getattr(signal.Signals, name, None)
    if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
        raise ConfigurationError(f"GracefulInterrupt: requeue_signal={name!r}: give SIGUSR1, SIGUSR2 or SIGTERM.")
    return found
