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

    Other strategies stay as they are. The arguments are those of the group `memory`, as far as the strategy takes them. The saved configuration keeps the name, so that
    a resumed run may change the memory options.

    Raises:
        ConfigurationError: If no strategy of this package has the name.
    """
    name = config.trainer.strategy
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
    memory: Any = OmegaConf.to_container(config.memory, resolve=True)
    arguments = {key: value for key, value in memory.items() if key in taken}
    changed = config.copy()
    with open_dict(changed):
        changed.trainer.strategy = {"_target_": target, **arguments, **StrategyRegistry[name]["init_params"]}
    return changed


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
