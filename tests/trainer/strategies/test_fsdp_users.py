"""Modules that write weights, mark parameters or choose FSDP2's options train sharded, or are refused."""

from functools import cache

import pytest
import torch

from tests.support.lanes import SLOW, some
from tests.support.ranks import sharded_users
from tests.support.ranks.processes import on_ranks

HOLDS = some(("parameters", "shards"), "parameters")
BOTH = ("Halves", "Marks", "KeepsGathered", "Sums", "ReducesInBFloat16", "ReadsBatch")


@cache
def fits(hold):
    return on_ranks(sharded_users.fits, hold, *BOTH, *(("ClampsInStep",) if hold == "parameters" else ()))


@cache
def alone(name):
    return sharded_users.alone(name)["weights"]


def assert_trained_as_alone(hold, name, other=None):
    for found in fits(hold):
        torch.testing.assert_close(found[name]["weights"], alone(other or name), rtol=0, atol=1e-10)


def test_whole_parameters_that_a_step_writes_stay_written():
    assert_trained_as_alone("parameters", "ClampsInStep")


@pytest.mark.parametrize("hold", HOLDS)
def test_weights_that_hooks_write_stay_written(hold):
    assert_trained_as_alone(hold, "Halves")


@pytest.mark.parametrize("hold", HOLDS)
def test_parameters_keep_the_attributes_that_optimizers_group_by(hold):
    assert_trained_as_alone(hold, "Marks")


@pytest.mark.parametrize("hold", HOLDS)
def test_blocks_that_stay_gathered_after_their_forward_train(hold):
    assert_trained_as_alone(hold, "KeepsGathered", "Descends")


@SLOW
def test_gradients_are_divided_by_the_factor_that_a_module_sets():
    for whole, shards in zip(fits("parameters"), fits("shards"), strict=True):
        torch.testing.assert_close(whole["Sums"]["weights"], shards["Sums"]["weights"], rtol=0, atol=1e-10)
        assert (whole["Sums"]["weights"] - alone("Descends")).abs().max() > 1e-3


@pytest.mark.parametrize("hold", HOLDS)
def test_gradients_that_are_reduced_coarsely_split_up_to_their_rounding(hold):
    for found in fits(hold):
        difference = found["ReducesInBFloat16"]["weights"] - alone("Descends")
        assert 0 < difference.abs().max() < 1e-2


@pytest.mark.parametrize("hold", HOLDS)
def test_a_step_gets_its_batch_as_it_is_whatever_the_roots_policy(hold):
    assert [found["ReadsBatch"]["read"] for found in fits(hold)] == [torch.float32] * 2


def test_what_shards_would_lose_without_a_word_is_refused_by_name():
    for refused in on_ranks(sharded_users.refusals):
        assert "hook of the gradient of norm.weight" in refused["hook"]
        assert "hook of the gradient of norm.weight" in refused["later hook"]
        assert "other makes sparse ones" in refused["sparse"]
        assert "cannot run EMAWeightAveraging" in refused["average"]
        assert "uses parameters outside of their modules' forward" in refused["penalty"]
        assert "the step writes the parameter norm.weight" in refused["write"]
