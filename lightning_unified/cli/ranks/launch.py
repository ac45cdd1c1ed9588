"""How this process was started: by a user, torchrun, SLURM, or a strategy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Launch", "launch_of", "ranks_left"]

_INTERACTIVE = ("bash", "interactive")  # job names under which Lightning (2.6) takes a SLURM shell for a plain one


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The place of this process among the processes of its run.

    Args:
        by: The program that started it. `user` is a process that may start further ranks itself, `strategy` is one of these.
        rank: Its number over all machines.
        size: The number of processes that were started; 1 for a `user`'s.
        local_size: The number of them on this machine.
    """

    by: Literal["user", "torchrun", "slurm", "strategy"] = "user"
    rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files and prints its lines."""
        return self.rank == 0

    @property
    def is_external(self) -> bool:
        """Whether another program started all ranks, which then must agree on what each would decide alone."""
        return self.by in ("torchrun", "slurm") and self.size > 1

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return max(1, self.size // self.local_size)

    def command(self, program: str, *, ranks: int | None = None) -> str:
        """Return the command that starts this run's processes again.

        Args:
            program: The command of one process, such as `python train.py`.
            ranks: Another number of processes; None for the present one.
        """
        each = self.local_size if ranks is None else max(1, ranks // self.nodes)
        if not self.is_external:
            return program
        if self.by == "slurm":
            return f"srun --nodes={self.nodes} --ntasks-per-node={each} {program}"
        script = program.partition(" ")[2]  # torchrun takes the arguments of Python, without Python
        place = f"--nnodes {self.nodes}" if self.nodes > 1 else "--standalone"
        return f"torchrun {place} --nproc-per-node {each} {script}"


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Return how the process with the variables `environ` was started.

    Sources: torch 2.13, `distributed/elastic/agent/server/local_elastic_agent.py`; Lightning 2.6.6,
    `fabric/plugins/environments/`; the variables that `srun` documents.
    """
    if "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ:
        size = int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        return Launch(by="torchrun", rank=int(environ["RANK"]), size=size, local_size=local_size)
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        size, nodes = int(environ["SLURM_NTASKS"]), int(environ.get("SLURM_NNODES", "1"))
        rank = int(environ.get("SLURM_PROCID", "0"))
        return Launch(by="slurm", rank=rank, size=size, local_size=max(1, size // nodes))
    if environ.get("LOCAL_RANK", "0") not in ("", "0"):
        size = int(environ.get("WORLD_SIZE") or 2)
        return Launch(by="strategy", rank=int(environ["LOCAL_RANK"]), size=size, local_size=size)
    return Launch(rank=int(environ.get("NODE_RANK") or 0))


def ranks_left(size: int, *, lost: int, batch: int | None) -> int:
    """Return the number of ranks to go on with after `lost` of `size` are gone.

    It is the largest number that divides the effective `batch`, which the ranks share evenly; at least 1.
    """
    left = max(1, size - lost)
    return next((ranks for ranks in range(left, 0, -1) if not batch or batch % ranks == 0), 1)
