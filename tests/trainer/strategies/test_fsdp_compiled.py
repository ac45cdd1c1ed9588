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
each = pytest.mark.parametrize("name", ["planned", slow("split"), slow("failing")])


@cache
def alone(rows):
    return whole_fit("plain", module={"rows": rows})["weights"]


@cache
def ranks(hold, name):
    return on_ranks(compiled.fits, hold, name)


@pytest.mark.slow
@both
@each
def test_compiled_blocks_train_as_one_process(hold, name):
    for fits in ranks(hold, name):
        torch.testing.assert_close(fits[name]["weights"], alone(compiled.ROWS[name]), rtol=0, atol=1e-10)
        assert fits[name]["recoveries"] == (name == "failing")


@pytest.mark.slow
@both
@each
def test_the_gathering_of_parameters_breaks_no_graph(hold, name):
    for fits in ranks(hold, name):
        assert fits[name]["breaks"] == {}
        assert fits[name]["graphs"] == 1 or name != "planned"
        assert not fits[name]["left"]


@pytest.mark.slow
@both
def test_compiled_blocks_are_planned(hold):
    for fits in ranks(hold, "planned"):
        plan = fits["planned"]["plan"]
        assert plan.reasons["compile"].startswith("as asked: 3 blocks of blocks")
        assert plan.prediction is not None


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["shards", "parameters"])
def test_blocks_that_the_user_compiled_train_and_are_planned(hold):
    for fit in on_ranks(compiled.by_user, hold):
        torch.testing.assert_close(fit["weights"], alone(FEW), rtol=0, atol=1e-10)
        assert fit["plan"].prediction is not None


def test_a_graph_of_a_whole_child_is_refused():
    for ended in on_ranks(compiled.whole):
        assert 'compile="whole": a graph cannot gather the parameters that FSDP2 shards' in ended.text
