"""The strategy that `trainer.strategy` names, made from the memory options of the run."""

import inspect
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.config.binding import target_of
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.cli.ranks.launch import Launch
from lightning_unified.errors import ConfigurationError

__all__ = ["with_devices", "with_strategy"]

_TARGETS = {"unified_ddp": "UnifiedDDPStrategy", "unified_fsdp": "UnifiedFSDPStrategy", "unified": "UnifiedStrategy"}


def with_strategy(config: DictConfig) -> DictConfig:
    """Return `config` with the arguments of a unified strategy in place of its name.

    Other strategies stay as they are. The arguments are those of the group `memory`, as far as the strategy takes them, and those of
    `fsdp` for unified_fsdp. The saved configuration keeps the name, so that a resumed run may change the memory options.

    Raises:
        ConfigurationError: If no strategy of this package has the name, or a key of `fsdp` is not of this strategy.
    """
    name = config.trainer.strategy
    own = _own_of_fsdp(config)
    from lightning.pytorch.strategies import StrategyRegistry

    kind = next((kind for kind in _TARGETS if isinstance(name, str) and name.startswith(kind)), None)
    if kind is None:
        return config
    if name not in StrategyRegistry:
        known = [one for one in StrategyRegistry if one.startswith("unified")]
        raise ConfigurationError(
            f"trainer.strategy={name}: there is no such strategy among {', '.join(sorted(known))}{did_you_mean(name, known)}"
        )
    target = f"lightning_unified.strategies.{_TARGETS[kind]}"
    taken = inspect.signature(target_of(target)).parameters
    own = own if kind == "unified_fsdp" else {}
    memory: Any = OmegaConf.to_container(config.memory, resolve=True)
    arguments = {key: value for key, value in memory.items() if key in taken}
    changed = config.copy()
    with open_dict(changed):
        changed.trainer.strategy = {"_target_": target, **arguments, **own, **StrategyRegistry[name]["init_params"]}
    return changed


def _own_of_fsdp(config: DictConfig) -> dict[str, Any]:
    """Return the keys of `fsdp`; a run of an earlier version has none.

    Raises:
        ConfigurationError: If a key has no effect under the strategy, or is not true or false.
    """
    own: Any = OmegaConf.to_container(config.get("fsdp") or OmegaConf.create({}), resolve=True)
    key = "save_distributed_checkpoint"
    value = own.get(key, True)
    if not isinstance(value, bool):
        raise ConfigurationError(f"fsdp.{key}={value}: give true or false.")
    if not value and not _is_fsdp(config.trainer.strategy):
        raise ConfigurationError(
            f"fsdp.{key}=false is of trainer.strategy=unified_fsdp, and other strategies always save one file; leave it out, or add "
            "trainer.strategy=unified_fsdp."
        )
    return own


def _is_fsdp(strategy: Any) -> bool:
    named = strategy.get("_target_", "") if OmegaConf.is_dict(strategy) else strategy
    return isinstance(named, str) and ("unified_fsdp" in named or "UnifiedFSDP" in named)


def with_devices(config: DictConfig, launch: Launch, given: set[str]) -> DictConfig:
    """Return `config` with the devices and machines of a launcher that started all ranks.

    Args:
        config: The configuration.
        launch: How this process was started.
        given: The keys on the command line, which are left as they are.

    Raises:
        ConfigurationError: If the launcher started several processes for a strategy of one device.
    """
    if not launch.is_external:
        return config
    strategy = config.trainer.strategy
    if OmegaConf.is_dict(strategy) and str(strategy.get("_target_")).endswith(".UnifiedStrategy"):
        raise ConfigurationError(
            f"{launch.by} started {launch.size} processes, and strategy=unified trains on one device; add trainer.strategy=unified_ddp."
        )
    found = {"devices": launch.local_size, "num_nodes": launch.nodes}
    with open_dict(config):
        config.trainer.update({key: value for key, value in found.items() if f"trainer.{key}" not in given})
    return config
