"""The strategy that `trainer.strategy` names on the command line."""

import pytest
from omegaconf import OmegaConf

from lightning_unified.cli.ranks.strategy import with_strategy
from lightning_unified.errors import ConfigurationError


def config(name):
    return OmegaConf.create({"trainer": {"strategy": name}, "memory": {"budget": "1GiB", "predict": True}})


def test_a_name_may_say_what_ranks_hold():
    strategy = with_strategy(config("unified_fsdp_shards")).trainer.strategy

    assert strategy == {
        "_target_": "lightning_unified.strategies.UnifiedFSDPStrategy",
        "budget": "1GiB",
        "hold": "shards",
    }


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigurationError, match=r"did you mean unified_fsdp_shards\?"):
        with_strategy(config("unified_fsdp_shard"))


def test_other_strategies_stay_as_they_are():
    assert with_strategy(config("ddp")).trainer.strategy == "ddp"
