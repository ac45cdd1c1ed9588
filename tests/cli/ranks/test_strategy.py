"""The strategy that `trainer.strategy` names on the command line."""

import pytest
from omegaconf import OmegaConf

from lightning_unified.cli.ranks.strategy import with_strategy
from lightning_unified.errors import ConfigurationError


def config(name):
    return OmegaConf.create(
        {"trainer": {"strategy": name}, "memory": {"budget": "1GiB", "predict": True, "compile": False}}
    )


def test_a_name_may_say_what_ranks_hold():
    strategy = with_strategy(config("unified_fsdp_shards")).trainer.strategy

    assert strategy == {
        "_target_": "lightning_unified.strategies.UnifiedFSDPStrategy",
        "budget": "1GiB",
        "compile": False,
        "predict": True,
        "hold": "shards",
    }


def test_the_keys_of_fsdp_are_arguments_of_unified_fsdp_alone():
    said = {"fsdp": {"save_distributed_checkpoint": False}}

    assert (
        with_strategy(OmegaConf.merge(config("unified_fsdp"), said)).trainer.strategy.save_distributed_checkpoint
        is False
    )
    with pytest.raises(ConfigurationError, match=r"=false is of trainer\.strategy=unified_fsdp"):
        with_strategy(OmegaConf.merge(config("unified_ddp"), said))
    with pytest.raises(ConfigurationError, match=r"fsdp\.save_distributed_checkpoint=maybe: give true or false"):
        with_strategy(OmegaConf.merge(config("unified_fsdp"), {"fsdp": {"save_distributed_checkpoint": "maybe"}}))


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigurationError, match=r"did you mean unified_fsdp_shards\?"):
        with_strategy(config("unified_fsdp_shard"))


def test_other_strategies_stay_as_they_are():
    assert with_strategy(config("ddp")).trainer.strategy == "ddp"
