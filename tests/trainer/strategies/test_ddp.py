"""Two processes train as under plain DDP, whole or split, through failures of one.

No process waits for the other without end.
"""

import inspect
import pickle
from functools import cache

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_unified import UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from lightning_unified.planner.first_batch.distributed import Offer, settled
from lightning_unified.planner.search.combinations import Combination
from tests.support.lanes import slow, some
from tests.support.ranks import compressor as ddp_compressor
from tests.support.ranks import failing_runs, planned_runs
from tests.support.ranks import modules as ddp_modules
from tests.support.ranks import runs as ddp_runs
from tests.support.ranks.processes import Ended, on_ranks


@cache
def plain(kind):
    return on_ranks(ddp_runs.same_as_ddp, kind)


FAST = ("forward", "smaller", "half written", "undisturbed", "all optimizer steps")


@cache
def recovered(*names):
    """Return fits of RECOVERED; those of the fast lane share two processes."""
    shared = {*names} <= {*FAST} and names != FAST
    return recovered(*FAST) if shared else on_ranks(ddp_runs.recovered, *names)


@pytest.fixture(scope="module")
def foreseen():
    return on_ranks(planned_runs.planned)


@pytest.fixture(scope="module")
def refusals():
    return on_ranks(failing_runs.refusals)


def alike(one, other):
    return torch.equal(one["weights"], other["weights"]) and one["metrics"] == other["metrics"]


KINDS = ["windows", slow(""), slow("unused"), slow("ragged")]


@pytest.mark.parametrize("kind", [*KINDS, slow("manual")])
def test_whole_batches_train_as_plain_ddp_trains_bit_for_bit(kind):
    for fits in plain(kind):
        assert alike(fits["whole"], fits["ddp"])
        assert fits["whole"].get("seen") == fits["ddp"].get("seen")


@pytest.mark.parametrize("kind", KINDS)
def test_split_batches_train_as_plain_ddp_trains_up_to_rounding(kind):
    for fits in plain(kind):
        ddp = fits.get("ddp, split", fits["ddp"])
        torch.testing.assert_close(fits["split"]["weights"], ddp["weights"], rtol=1e-8, atol=1e-10)
        assert fits["split"]["metrics"] == pytest.approx(ddp["metrics"])
        assert fits["split"]["largest"] < 8


def test_buffers_are_the_first_ranks():
    first, second = plain("windows")

    for mine, other, ddp in zip(
        first["whole"]["buffers"], second["whole"]["buffers"], first["ddp"]["buffers"], strict=True
    ):
        assert torch.equal(mine, ddp)
        assert torch.equal(other, ddp)


@pytest.mark.parametrize(
    ("phase", "twin"),
    some(
        [
            *((phase, "smaller") for phase in ddp_runs.STEPS),
            ("backward, windows", "smaller, windows"),
            ("reduction, windows", "smaller, windows"),
            ("last backward", "smaller still"),
        ],
        ("forward", "smaller"),
    ),
)
def test_all_repeat_a_batch_in_the_same_micro_batches_if_one_rank_lacks_memory(phase, twin):
    first, second = recovered(phase, twin)
    for fits in (first, second):
        assert fits[phase]["recoveries"] == 1
        assert alike(fits[phase], fits[twin])
        assert fits[phase]["largest"] == fits[twin]["largest"]
    assert first[phase]["sizes"] == second[phase]["sizes"]
    assert first[phase]["events"][0].startswith("rank 1 ran out of memory in")


@pytest.mark.parametrize("phase", some([*ddp_runs.WEIGHTS, "first optimizer step"], "half written"))
def test_a_rank_whose_optimizer_step_fails_goes_on_with_what_another_one_has(phase):
    failed = 0 if phase == "first optimizer step" else 1
    ranks = recovered(phase, "undisturbed")
    for rank, fits in enumerate(ranks):
        assert alike(fits[phase], fits["undisturbed"])
        assert fits[phase]["recoveries"] == (rank == failed)
    assert f"taken from rank {1 - failed}" in ranks[failed][phase]["events"][0]


def test_all_ranks_repeat_the_batch_if_no_optimizer_step_went_well():
    for fits in recovered("all optimizer steps", "smaller"):
        assert alike(fits["all optimizer steps"], fits["smaller"])
        assert fits["all optimizer steps"]["recoveries"] == 1


@pytest.mark.slow
def test_memory_that_runs_out_in_a_validation_is_the_ranks_own_affair():
    first, second = recovered("validation", "undisturbed")

    assert alike(first["validation"], first["undisturbed"])
    assert second["validation"]["metrics"] == pytest.approx(second["undisturbed"]["metrics"])
    assert (first["validation"]["recoveries"], second["validation"]["recoveries"]) == (0, 1)


def test_ranks_take_the_most_careful_ones_size():
    first, second = on_ranks(ddp_runs.sizes)

    assert (first["pressed"], first["after"], second["after"]) == (True, 4, 4)
    assert first["sizes"] == second["sizes"]
    assert first["largest"] == second["largest"] == 2
    assert torch.equal(first["weights"], second["weights"])


def test_a_window_by_terms_counts_those_of_all_ranks():
    for gradient, together in on_ranks(ddp_runs.windows_by_terms):
        torch.testing.assert_close(gradient, together, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    for fits in on_ranks(ddp_runs.resumed, str(tmp_path)):
        assert torch.equal(fits["resumed"]["weights"], fits["straight"]["weights"])
        assert fits["resumed"]["largest"] == 4


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [
        slow(ddp_modules.Broken, "KeyError", "rank 1 failed: KeyError: 'no such column'"),
        (
            ddp_modules.TooLarge,
            "OutOfMemoryError",
            "rank 1 failed: OutOfMemoryError: the activations of 1 row do not fit",
        ),
    ],
)
def test_an_error_on_one_rank_ends_all_and_is_told(kind, own, text):
    first, second = on_ranks(failing_runs.broken, kind)

    assert (first.kind, second.kind) == ("RankError", own)
    assert text in first.text


@pytest.mark.parametrize("phase", some(["forward", "optimizer step"], "forward"))
def test_all_end_where_nothing_is_to_be_repeated(phase):
    first, second = on_ranks(failing_runs.unrecovered, phase)

    assert (first.kind, second.kind) == ("RankError", "RuntimeError")
    assert "rank 1 failed: RuntimeError: [enforce fail at alloc_cpu.cpp" in first.text


def test_weights_half_written_with_no_whole_ones_anywhere_end_all_ranks():
    first, second = on_ranks(failing_runs.half_written)

    assert (first.kind, second.kind) == ("HalfUpdatedError", "RankError")
    assert "rank 0 had written some" in second.text


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named():
    first, second = on_ranks(failing_runs.dying)

    assert (first.kind, second.kind) == ("RankError", "Gone")
    assert "no answer from rank 1" in first.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Gathers", "RunError: training_step asks for all_gather"),
        ("Sparse", "gradients, and that of embed.weight is torch.sparse_coo"),
        ("Synced", "the metric accuracy has dist_sync_on_step=True"),
        ("Sharded", "ZeroRedundancyOptimizer waits"),
        ("Different", "rank 1 made another Different than rank 0"),
        ("SyncBatchNorm", "cannot run SyncBatchNorm"),
    ],
)
def test_what_would_wait_in_the_middle_of_a_step_is_refused_by_name(refusals, name, text):
    for refused in refusals:
        assert text in refused[name]


def test_ranks_that_have_enough_run_whole_batches_as_planned(foreseen):
    for fits in foreseen:
        assert (fits["enough"]["recoveries"], fits["enough"]["largest"]) == (0, 16)
        assert fits["enough"]["plan"].prediction.rows == 16


def test_all_ranks_run_the_smallest_micro_batch_and_options_that_any_plans(foreseen):
    first, second = (fits["one is short"] for fits in foreseen)

    assert (first["recoveries"], second["recoveries"]) == (0, 0)
    assert first["sizes"] == second["sizes"]
    assert first["largest"] == second["largest"] < 16
    assert first["plan"].recomputed == second["plan"].recomputed == "all blocks"
    assert first["plan"].prediction.rows == second["plan"].prediction.rows == second["largest"]
    assert second["plan"].prediction.reserved_bytes <= foreseen[1]["short"]
    torch.testing.assert_close(first["weights"], foreseen[0]["enough"]["weights"], rtol=1e-8, atol=1e-10)
    assert torch.equal(first["weights"], second["weights"])


def test_what_ranks_reduce_through_is_counted_as_a_workspace(foreseen):
    assert {fits["enough"]["plan"].prediction.categories["workspaces"] for fits in foreseen} == {ddp_runs.MIB}


@pytest.mark.slow
def test_a_rank_that_cannot_trace_its_step_goes_by_the_others_plan():
    first, second = on_ranks(planned_runs.partly_planned)

    assert second["plan"].prediction is None
    assert first["largest"] == second["largest"] == first["plan"].prediction.rows < 16
    assert first["plan"].recomputed == second["plan"].recomputed
    assert "as planned by the other ranks" in second["plan"].reasons["recompute"]


def test_a_rank_whose_smallest_plan_does_not_fit_ends_all_before_any_update(foreseen):
    first, second = foreseen

    assert first["refused"].startswith("RankError: rank 1 failed: BudgetError: no plan fits: ")
    assert second["refused"].startswith("BudgetError: no plan fits: ")


def test_the_setting_that_fits_everywhere_and_is_fastest_on_the_slowest_rank_wins():
    plain, some, every = (Combination(precision="32-true", loss_chunk=chunk) for chunk in (None, 2, 1))
    fits = {"fits": True, "needs": 1}

    def offers(*, of_some=True):
        yield {
            plain: Offer(fits=True, seconds=1, needs=3),
            some: Offer(seconds=3, **fits),
            every: Offer(seconds=3, **fits),
        }
        others = {some: Offer(fits=of_some, seconds=1, needs=2), every: Offer(seconds=4, **fits)}
        yield {plain: Offer(fits=False, seconds=1, needs=3), **others}
        yield {}  # cannot tell

    assert settled([plain, some, every], list(offers())) == some
    assert settled([plain, some, every], list(offers(of_some=False))) == every
    nowhere = [{plain: Offer(fits=False, seconds=1, needs=3), some: Offer(fits=False, seconds=9, needs=2)}]
    assert settled([plain, some], nowhere) == some


def test_ranks_on_one_machines_memory_get_a_part_of_it_each():
    for fits in plain("windows"):
        budget = fits["whole"]["budget"]

        assert budget.sharers == 2
        assert budget.reason.startswith("one part of 2, for as many processes on the same memory")


def test_it_takes_every_single_device_argument_that_several_devices_can_have():
    own, one = (inspect.signature(kind).parameters for kind in (UnifiedDDPStrategy, UnifiedStrategy))
    shared = set(one) - {"simulate", "detect_faults"}  # of machines with one device

    assert {name: (own[name].default, own[name].annotation) for name in shared} == {
        name: (one[name].default, one[name].annotation) for name in shared
    }


@pytest.mark.parametrize("method", ["popen", "spawn", "fork"])
def test_it_is_registered_with_each_start_method(method):
    name = "unified_ddp" if method == "popen" else f"unified_ddp_{method}"

    assert StrategyRegistry.get(name)._start_method == method


def test_it_can_be_sent_to_a_process_that_is_spawned():
    strategy = UnifiedDDPStrategy(micro_batch_size=3, start_method="spawn")

    assert pickle.loads(pickle.dumps(strategy)).policy.sizes.max_micro_batch_size == 3


@pytest.mark.slow
def test_a_trainer_of_two_ranks_pickles_while_it_trains():
    for steps in on_ranks(ddp_runs.pickled):
        assert steps and all(steps)


def test_a_start_method_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r'start_method=.threads.: give "popen"'):
        UnifiedDDPStrategy(start_method="threads")


def test_a_fit_that_ended_badly_says_so_in_these_tests():
    assert isinstance(on_ranks(int, "no number")[0], Ended)


@pytest.mark.slow
def test_a_compressor_on_two_ranks_is_that_of_one_process_on_the_joined_batch():
    ranks = on_ranks(ddp_compressor.on_two)
    for objective in ("relaxed", "reinforce"):
        alone = ddp_compressor.trained("auto", ranks=1, objective=objective)
        for found in (fits[f"{objective}, {name}"] for fits in ranks for name in ("whole", "split")):
            assert (found["weights"] - alone["weights"]).norm() <= 1e-12 * alone["weights"].norm()
            torch.testing.assert_close(found["price"], alone["price"], rtol=1e-12, atol=0)
            assert found["figures"] == pytest.approx(alone["figures"], rel=1e-6)
        assert alone["price"] != alone["first_price"]
