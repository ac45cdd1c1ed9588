"""Where a process stands among the ranks of its run, from the variables of its launcher."""

import pytest

from lightning_unified.cli.ranks.launch import Launch, launch_of, ranks_left
from tests.support.ranks.launched import slurm_variables, torchrun_variables


@pytest.mark.parametrize(("by", "variables"), [("torchrun", torchrun_variables), ("slurm", slurm_variables)])
def test_a_launcher_that_starts_all_ranks_is_known_by_its_variables(by, variables):
    second = launch_of(variables(1, 2, 29500))

    assert second == Launch(by=by, rank=1, size=2, local_size=2)
    assert second.is_external and not second.is_first


def test_a_shell_of_slurm_is_a_users():
    assert launch_of({**slurm_variables(0, 1, 29500), "SLURM_JOB_NAME": "bash"}) == Launch()
    assert not launch_of(slurm_variables(0, 1, 29500)).is_external


def test_a_rank_that_a_strategy_started_is_not_the_first():
    started = launch_of({"LOCAL_RANK": "1", "WORLD_SIZE": "2"})

    assert (started.by, started.rank, started.is_external) == ("strategy", 1, False)
    assert launch_of({"LOCAL_RANK": "0"}) == Launch()


def test_the_printed_command_starts_the_same_ranks_again():
    torchrun = Launch(by="torchrun", rank=0, size=4, local_size=4)
    nodes = Launch(by="slurm", rank=0, size=8, local_size=4)

    assert Launch().command("python train.py") == "python train.py"
    assert torchrun.command("python train.py") == "torchrun --standalone --nproc-per-node 4 train.py"
    assert torchrun.command("python -m lightning_unified train", ranks=3) == (
        "torchrun --standalone --nproc-per-node 3 -m lightning_unified train"
    )
    assert nodes.command("python train.py") == "srun --nodes=2 --ntasks-per-node=4 python train.py"


@pytest.mark.parametrize(
    ("size", "lost", "batch", "left"), [(4, 1, 12, 3), (4, 1, 32, 2), (2, 1, 7, 1), (8, 1, None, 7)]
)
def test_fewer_ranks_share_the_batch_evenly(size, lost, batch, left):
    assert ranks_left(size, lost=lost, batch=batch) == left
