"""Compose a configuration from overrides with Hydra, outside of its application."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf, open_dict

__all__ = ["CONFIG_NAME", "PACKAGED", "Composed", "composed", "flat", "groups", "searching"]

CONFIG_NAME = "train"
PACKAGED = "pkg://lightning_unified.conf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A configuration, and the chosen option of each group (`{"memory": "small", …}`)."""

    config: DictConfig
    choices: dict[str, str | None]


@contextmanager
def searching(config_path: str) -> Iterator[None]:
    """Make `composed` read the configuration under `config_path`.

    The path is a folder or `pkg://package.name`.

    Inside a running Hydra application, that application's search path applies.
    """
    if GlobalHydra.instance().is_initialized():
        yield
    elif config_path.startswith("pkg://"):
        with initialize_config_module(config_path.removeprefix("pkg://"), version_base="1.3"):
            yield
    else:
        with initialize_config_dir(config_path, version_base="1.3"):
            yield


def composed(overrides: Sequence[str]) -> Composed:
    """Compose `overrides`; call it inside `searching`.

    The run's name, which Hydra's resolver gives only inside a job, is set to the chosen model.
    """
    config = compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
        if "name" in config and OmegaConf.is_interpolation(config, "name"):
            config["name"] = choices.get("model")
    return Composed(config=config, choices=choices)


def groups() -> dict[str, list[str]]:
    """Return every group of the search path with its choices.

    Hydra's own groups, such as `"hydra/launcher"`, are included.

    A folder inside a group with choices holds further choices of that group: `model=wordle/qwen2_5_3b`.
    """
    # The loader's own methods of these names copy the whole repository at every call.
    repository: Any = getattr(GlobalHydra.instance().config_loader(), "repository")  # noqa: B009 - not of the declared type
    found: dict[str, list[str]] = {}

    def walk(parent: str) -> None:
        for name in repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            options = repository.get_group_options(group, ObjectType.CONFIG)
            if options and parent in found:
                found[parent] = sorted([*found[parent], *(f"{name}/{option}" for option in options)])
            elif options:
                found[group] = sorted(options)
            walk(group)

    walk("")
    return found


def flat(config: Any, *, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of `config` by dotted name; lists and empty mappings are leaves."""
    container = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    if not isinstance(container, dict) or not container:
        return {prefix: container}
    leaves: dict[str, Any] = {}
    for key, value in container.items():
        leaves.update(flat(value, prefix=f"{prefix}.{key}" if prefix else str(key)))
    return leaves
