"""Ranks as torchrun or SLURM starts them: real processes with the variables of the launcher."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.programs import Program

TRAIN = ROOT / "train.py"
TINY = (
    "hardware=cpu",
    "memory=debug",
    "data=builtin",
    "model.width=16",
    "model.heads=2",
    "model.layers=1",
    "model.feed_forward=16",
    "trainer.enable_progress_bar=false",
)
LIMIT_S = 240.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    return {
        **{name: str(value) for name, value in names.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def slurm_variables(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"SLURM_NTASKS": size, "SLURM_NTASKS_PER_NODE": size, "SLURM_NNODES": 1, "SLURM_NODEID": 0}
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": 4711}
    return {
        **{name: str(value) for name, value in {**numbers, **own}.items()},
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class Launched:
    """The ranks of one run, all started at once; `close` kills those that still run."""

    def __init__(self, *arguments: object, cwd: Path, variables=torchrun_variables, size: int = 2, **more: str) -> None:
        port = free_port()
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
        self.programs = [
            Program(TRAIN, *arguments, cwd=cwd, environment={**common, **variables(rank, size, port)})
            for rank in range(size)
        ]

    def send(self, number: int, *, rank: int) -> None:
        self.programs[rank].send(number)

    def until(self, is_there, *, limit_s: float = LIMIT_S) -> "Launched":
        """Wait until `is_there` returns something, or all ranks have ended."""
        wait_until(is_there, lambda: any(program.runs for program in self.programs), limit_s=limit_s)
        return self

    def wait(self, limit_s: float = LIMIT_S) -> list[subprocess.CompletedProcess]:
        deadline = time.monotonic() + limit_s
        return [program.wait(max(1.0, deadline - time.monotonic())) for program in self.programs]


def wait_until(is_there, runs, *, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_there() and runs() and time.monotonic() < end:
        time.sleep(0.1)


def real_torchrun(*arguments: object, cwd: Path, size: int = 2) -> list[str]:
    """Return the command of torchrun for a program and its arguments."""
    flags = ["--standalone", "--nproc-per-node", str(size)]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *map(str, arguments)]
