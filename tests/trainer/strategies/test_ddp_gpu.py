"""Two real GPUs over NCCL train as plain DDP.

One of them may have too little memory. Run with `-m gpu`.
"""

import pytest
import torch

from tests.support.ranks import gpu_runs as ddp_gpu_runs
from tests.support.ranks.processes import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def test_two_gpus_train_as_plain_ddp_trains():
    for fits in on_ranks(ddp_gpu_runs.same_as_ddp):
        assert fits["backend"] == "nccl"
        torch.testing.assert_close(fits["whole"]["weights"], fits["ddp"]["weights"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            fits["split, windows"]["weights"], fits["ddp, windows"]["weights"], rtol=1e-8, atol=1e-10
        )


def test_reductions_beside_the_backward_pass_equal_those_of_plain_ddp():
    for found in on_ranks(ddp_gpu_runs.queued):
        plain = found.pop("ddp")
        for weights in found.values():
            torch.testing.assert_close(weights, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_rank_that_runs_out_of_memory_makes_both_go_on_in_parts(precision):
    first, second = on_ranks(ddp_gpu_runs.one_rank_too_small, precision, False)

    same_weights_in_parts(first, second, precision)
    assert first["small"]["recoveries"] >= 1
    assert first["small"]["events"][0].startswith("rank 1 ran out of memory in")
    assert second["small"]["events"][0].startswith("out of memory in")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_rank_whose_budget_is_too_small_makes_both_plan_parts(precision):
    first, second = on_ranks(ddp_gpu_runs.one_rank_too_small, precision, True)

    same_weights_in_parts(first, second, precision)
    assert (first["small"]["recoveries"], second["small"]["recoveries"]) == (0, 0), second["small"]["events"]


def same_weights_in_parts(first, second, precision):
    """Fail unless both ranks ran equal parts, and trained what the whole batch trains within the precision."""
    assert torch.equal(first["small"]["weights"], second["small"]["weights"])
    assert first["small"]["sizes"] == second["small"]["sizes"]
    assert first["small"]["largest"] == second["small"]["largest"] < 64
    assert first["small"]["steps"] == 8
    moved = (first["enough"]["weights"] - first["start"]).norm()
    apart = (first["enough"]["weights"] - first["small"]["weights"]).norm()
    assert apart < {"32-true": 0.01, "bf16-mixed": 0.2, "16-mixed": 0.05}[precision] * moved


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_rank_whose_optimizer_step_fails_resyncs_weights_state_and_scale(precision):
    first, second = on_ranks(ddp_gpu_runs.step_fails, precision)

    assert first["scales"] == second["scales"]
    assert len(set(first["scales"])) == 1
    for mine, theirs in zip(first["failed"], second["failed"], strict=True):
        assert (mine["recoveries"], theirs["recoveries"]) == (0, 1)
        assert torch.equal(mine["weights"], first["undisturbed"]["weights"])
        assert torch.equal(theirs["weights"], first["undisturbed"]["weights"])


def test_gradients_are_reduced_without_a_second_copy_of_them():
    for peak in on_ranks(ddp_gpu_runs.peaks):
        assert peak["ddp"] - peak["unified_ddp"] > 200 * ddp_gpu_runs.MIB


def test_a_rank_that_is_gone_is_named_by_the_other():
    first, second = on_ranks(ddp_gpu_runs.dying)

    assert (first.kind, second.kind) == ("RankError", "Gone")
    assert "no answer from rank 1" in first.text
