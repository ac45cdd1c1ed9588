"""The launcher of a strategy: starts the other ranks of a machine, and ends all after one is lost."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

__all__ = ["WatchedLauncher", "devices_of_launch", "watched"]

_EVERY_S = 0.5  # between two looks at the other processes
# torchrun waits as long between its SIGTERM and its SIGKILL (torch 2.13, distributed/elastic/multiprocessing/api.py).
_GRACE_S = 30.0
_PARENT = "LIGHTNING_UNIFIED_LAUNCHED_BY"
_SAVED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of processes that ended in order


class WatchedLauncher(_SubprocessScriptLauncher):
    """Start this program once more for each further rank of this machine, and watch them.

    Lightning's launcher kills all ranks, the first included, within five seconds after one has ended. Ranks of a unified strategy
    notice the loss themselves at their next meeting, and end with an error that names the lost rank. So this launcher waits for
    30 seconds before it kills what is left, such as a rank that waits in a collective of its device. Ranks whose starter is gone end
    likewise.

    Attributes:
        command: The command that starts a further rank; None starts this script with its arguments, as Lightning does.
    """

    command: Sequence[str] | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                os.environ.pop(_PARENT, None)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with _watching(self._lost, then=self._kill):
            return function(*args, **kwargs)

    def _lost(self) -> str | None:
        """Return in words which process of this machine is gone before its time; None if none is."""
        parent = os.environ.get(_PARENT)
        if parent is not None and parent != str(os.getppid()):
            return "the first rank of this machine is gone"
        for rank, process in enumerate(self.procs, start=1):
            code = process.poll()
            if code is not None and code not in _SAVED:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {rank} of this machine {how}"
        return None

    def _kill(self) -> None:
        for process in self.procs:
            process.kill()

    def wait(self, timeout: float = _GRACE_S) -> None:
        """Wait for the end of the processes that this launcher started; kill them after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    @override
    def _call_children_scripts(self) -> None:
        if self.command is None:
            super()._call_children_scripts()
            return
        environment = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK=str(environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        self.procs = [
            subprocess.Popen(self.command, env={**os.environ, "LOCAL_RANK": str(rank)})
            for rank in range(1, self.num_processes)
        ]


def devices_of_launch(
    devices: list[torch.device] | None, environ: Mapping[str, str] = os.environ
) -> list[torch.device] | None:
    """Return one CPU for each process that torchrun started here, unless devices were given.

    `devices="auto"` means one process on a CPU, and every GPU elsewhere.
    """
    if devices is None or len(devices) != 1 or devices[0].type != "cpu" or "TORCHELASTIC_RUN_ID" not in environ:
        return devices
    return devices * int(environ.get("LOCAL_WORLD_SIZE", "1"))


def watched(launcher: Any) -> Any:
    """Return `WatchedLauncher` in place of Lightning's launcher of scripts; any other launcher stays."""
    if type(launcher) is not _SubprocessScriptLauncher:
        return launcher
    return WatchedLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)


@contextmanager
def _watching(lost: Callable[[], str | None], *, then: Callable[[], None]) -> Iterator[None]:
    """Watch the other ranks during the block; once one is lost, end this process 30 seconds later.

    Args:
        lost: Returns the reason, or None. The exit code is 1.
        then: Called right before the end.
    """
    over = threading.Event()

    def run() -> None:
        while (reason := lost()) is None:
            if over.wait(_EVERY_S):
                return
        if over.wait(_GRACE_S):
            return
        then()
        try:
            os.write(
                2, f"error: {reason}, and this rank still waits for it; go on from the last checkpoint.\n".encode()
            )
        finally:
            os._exit(1)

    threading.Thread(target=run, name="rank-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()
