"""Sharded ranks compile their blocks: the same training, graphs without the gathering, and planned."""

from functools import cache

import pytest
import torch

from tests.support.lanes import slow
from tests.support.ranks import compiled
from tests.support.ranks.processes import on_ranks
from tests.support.ranks.sharded import FEW
from tests.support.ranks.sharded import alone as whole_fit

both = pytest.mark.parametrize("hold", ["shards", slow("parameters")])
NAMES = ("planned", "split", "failing")


@cache
def alone():
    return whole_fit("plain", module={"rows": FEW})["weights"]


@cache
def ranks(hold):
    return on_ranks(compiled.fits, hold, *NAMES)


@both
@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_train_as_one_process(hold, name):
    for fits in ranks(hold):
        torch.testing.assert_close(fits[name]["weights"], alone(), rtol=0, atol=1e-10)
    assert [fits["failing"]["recoveries"] for fits in ranks(hold)] == [1, 1]


@both
def test_the_gathering_of_parameters_breaks_no_graph(hold):
    for fits in ranks(hold):
        assert [fits[name]["breaks"] for name in NAMES] == [{}] * 3
        assert fits["planned"]["graphs"] == 1
        assert not any(fits[name]["left"] for name in NAMES)


@both
def test_compiled_blocks_are_planned(hold):
    for fits in ranks(hold):
        plan = fits["planned"]["plan"]
        assert plan.reasons["compile"].startswith("as asked: 3 blocks of blocks")
        assert plan.prediction is not None


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["shards", "parameters"])
def test_blocks_that_the_user_compiled_train_and_are_planned(hold):
    for fit in on_ranks(compiled.by_user, hold):
        torch.testing.assert_close(fit["weights"], alone(), rtol=0, atol=1e-10)
        assert fit["plan"].prediction is not None


def test_a_graph_of_a_whole_child_is_refused():
    for ended in on_ranks(compiled.whole):
        assert 'compile="whole": a graph cannot gather the parameters that FSDP2 shards' in ended.text
