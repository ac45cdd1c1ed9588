"""The devices of a planned run, as the keys of the Trainer name them."""

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_unified.cost_model.rates.links import link_of
from lightning_unified.errors import ConfigurationError

__all__ = ["devices_of", "group_arguments"]

_CLASSES = {"UnifiedDDPStrategy": "unified_ddp", "UnifiedFSDPStrategy": "unified_fsdp"}
_PLANNED = ("unified_ddp", "unified_fsdp", "fsdp")


def group_arguments(config: DictConfig, *, backend: str, link: str | None) -> dict[str, Any]:
    """Return the planner's arguments for the devices of `config`; empty for one device.

    Args:
        config: The configuration.
        backend: The backend of the devices.
        link: The link between them, as `--link` gives it.

    Raises:
        ConfigurationError: If a key of the Trainer is not a number of devices or a strategy, or the strategy does not suit the number.
    """
    devices = devices_of(config, backend=backend)
    strategy = _strategy(config.trainer.strategy)
    if devices == 1:
        if link is not None:
            raise ConfigurationError(f"--link {link}: a run on one device has no link; add trainer.devices=8.")
        return {}
    if strategy is None:
        raise ConfigurationError(
            f"trainer.devices={config.trainer.devices} needs a strategy for {devices} devices; add trainer.strategy=unified_ddp for a copy of the "
            "module on each, or trainer.strategy=unified_fsdp to shard it."
        )
    if backend == "mps":
        raise ConfigurationError(
            f"trainer.devices={config.trainer.devices}: Lightning trains on one device of type mps."
        )
    if link is not None:
        link_of(link, name="--link")
    given = {"hold": _hold(config.trainer.strategy), "link": link}
    return {"devices": devices, "strategy": strategy, **{name: one for name, one in given.items() if one is not None}}


def devices_of(config: DictConfig, *, backend: str) -> int:
    """Return the number of devices on all machines; they need not be here.

    Raises:
        ConfigurationError: If `trainer.devices` or `trainer.num_nodes` is no number of them.
    """
    given, nodes = config.trainer.devices, config.trainer.num_nodes
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigurationError(f"trainer.num_nodes={nodes}: give the number of machines, 1 or more.")
    return _count(given, backend) * nodes


def _count(given: Any, backend: str) -> int:
    """Return the number of devices that a value of Lightning's `devices` names."""
    if OmegaConf.is_list(given) and len(given):
        return len(given)
    if isinstance(given, str) and "," in given:
        return len([one for one in given.split(",") if one.strip()])
    if given in ("auto", -1, "-1"):
        return _present(given, backend)
    try:
        count = 0 if isinstance(given, bool) else int(given)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ConfigurationError(
            f"trainer.devices={given}: give the number of devices, 1 or more; they need not be here."
        )
    return count


def _present(given: Any, backend: str) -> int:
    if backend not in ("cuda", "rocm"):
        return 1
    if not torch.cuda.is_available():
        raise ConfigurationError(f"trainer.devices={given} depends on the machine, and none is here; give a number.")
    return torch.cuda.device_count()


def _hold(given: Any) -> str | None:
    """Return the `hold` that `trainer.strategy` gives; None for the strategy's own choice."""
    if OmegaConf.is_dict(given):
        return given.get("hold")
    kept = str(given).removeprefix("unified_fsdp_")
    return kept if kept in ("parameters", "shards") else None


def _strategy(given: Any) -> str | None:
    """Return the strategy that `trainer.strategy` names; None for one device.

    Raises:
        ConfigurationError: If there is no strategy of that name.
    """
    if OmegaConf.is_dict(given):
        return _CLASSES.get(str(given.get("_target_")).rpartition(".")[2])
    name = str(given)
    if name in ("auto", "unified", "None"):
        return None
    found = next((known for known in _PLANNED if name == known or name.startswith(f"{known}_")), None)
    if found is None:
        raise ConfigurationError(
            f"trainer.strategy={name}: a plan knows {', '.join(_PLANNED)}, and unified for one device; give one of them."
        )
    return found
