"""Sharded ranks plan their step at the first batch, as the plan command does for so many devices."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.lanes import some
from tests.support.ranks import planned_shards
from tests.support.ranks.planned_shards import ROWS
from tests.support.ranks.processes import on_ranks
from tests.support.ranks.sharded import SETTINGS, trained

both = pytest.mark.parametrize("hold", some(["parameters", "shards"], "shards"))


@cache
def needed(hold):
    return planned_shards.needed(hold)


@cache
def planned(hold):
    """Return the fits of two ranks, one of which may have memory for half a recomputed batch only."""
    sizes = {size: prediction.reserved_bytes for size, prediction in needed(hold).items()}
    whole = (sizes[ROWS, 0] + sizes[ROWS, "all"]) // 2
    half = (sizes[ROWS // 2, "all"] + min(sizes[ROWS, "all"], sizes[ROWS // 2, 0])) // 2
    return on_ranks(planned_shards.planned, hold, whole, half)


@cache
def otherwise(hold):
    return on_ranks(planned_shards.planned_otherwise, hold)


@cache
def alone():
    kind: Any = planned_shards.Rows
    return trained("auto", ranks=1, rank=0, kind=kind, max_epochs=1)["weights"]


def assert_trained_as_alone(fits):
    torch.testing.assert_close(fits["weights"], alone(), rtol=0, atol=1e-10)


@both
def test_a_fit_predicts_the_peak_that_a_plan_predicts(hold):
    for fits in planned(hold):
        assert fits["enough"]["plan"].prediction.peak_bytes == needed(hold)[ROWS, 0].peak_bytes
        assert fits["recomputed"]["plan"].prediction.peak_bytes == needed(hold)[ROWS, "all"].peak_bytes
        assert fits["enough"]["recoveries"] == 0
        assert_trained_as_alone(fits["enough"])


@both
def test_a_plan_avoids_a_recovery(hold):
    for fits in planned(hold):
        assert fits["one is short"]["recoveries"] == 0


@pytest.mark.slow
@both
def test_a_fit_without_a_plan_needs_the_recovery(hold):
    for fits in otherwise(hold):
        assert fits["unplanned"]["recoveries"] == 1


@both
def test_ranks_take_the_size_and_options_of_the_most_careful_plan(hold):
    first, second = (fits["one is short"] for fits in planned(hold))

    assert first["largest"] == second["largest"] == ROWS // 2
    for fits in (first, second):
        assert fits["plan"].recomputed == "all blocks"
        assert fits["plan"].prediction.peak_bytes == needed(hold)[ROWS // 2, "all"].peak_bytes
        assert_trained_as_alone(fits)


@both
def test_ranks_recompute_where_whole_batches_fit_so(hold):
    for fits in planned(hold):
        assert fits["recomputed"]["plan"].recomputed == "all blocks"
        assert (fits["recomputed"]["recoveries"], fits["recomputed"]["largest"]) == (0, ROWS)
        assert_trained_as_alone(fits["recomputed"])


@pytest.mark.slow
@both
def test_a_module_that_shards_itself_is_planned_as_it_does(hold):
    peak = planned_shards.needed(hold, planned_shards.ShardsItself)[ROWS, 0].peak_bytes
    for fits in otherwise(hold):
        assert fits["shards itself"]["plan"].prediction.peak_bytes == peak
        assert_trained_as_alone(fits["shards itself"])


@pytest.mark.slow
@both
def test_a_module_that_shards_itself_in_other_ways_trains_unplanned_and_says_so(hold):
    for fits in otherwise(hold):
        own = fits["shards its way"]
        assert own["plan"].prediction is None
        assert len([event for event in own["events"] if "configure_model of ShardsItsWay shards it" in event]) == 1
        assert_trained_as_alone(own)


@both
def test_shards_and_whole_parameters_count_as_held_by_the_step(hold):
    whole = sum(8 * parameter.numel() for parameter in planned_shards.Rows().parameters())
    parameters = whole // 2 + whole * (hold == "parameters")
    for fits in planned(hold):
        scratch = fits["enough"]["held"][0] - parameters
        assert scratch == 2**20
        assert fits["enough"]["held"][1] == pytest.approx(parameters + scratch + 3 * whole // 2, abs=100)


@pytest.mark.slow
@both
def test_validations_are_planned_with_the_step(hold):
    weights = trained("auto", ranks=1, rank=0, **SETTINGS["clipped windows"])["weights"]
    for fits in otherwise(hold):
        validation = fits["validates"]["plan"].prediction.validation
        assert (validation.rows, validation.num_micro_batches) == (4, 1)
        assert validation.peak_bytes < fits["validates"]["plan"].prediction.peak_bytes
        torch.testing.assert_close(fits["validates"]["weights"], weights, rtol=0, atol=1e-10)


@both
def test_a_budget_below_every_plan_is_refused_before_the_first_update(hold):
    for fits in planned(hold):
        assert "no plan fits" in fits["refused"]
