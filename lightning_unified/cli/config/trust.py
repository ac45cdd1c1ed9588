"""Refuse a resumed run directory that would make this program do more than train.

A run directory may come from another person. Its files choose classes and paths, so each is checked before it is used:

| file | what is refused |
|---|---|
| `config.yaml`, and the configuration of the saved overrides | a `_target_` that is not one of this package's or Lightning's own training classes |
| | a path of a callback, a logger or the Trainer outside of the run directory |
| `.hydra/overrides.yaml` | an override of Hydra's own keys, such as `hydra.callbacks` |
| any file | a symbolic link that leads out of the run directory |
| `checkpoints/last.ckpt` | pickled objects other than tensors and plain data (`torch.load(weights_only=True)`) |

`--trust` switches these checks off, for runs whose files are the user's own.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_unified.cli.config.binding import target_of, targets
from lightning_unified.cli.config.overrides import key_of, parse_overrides
from lightning_unified.errors import ConfigurationError

__all__ = ["FLAG", "check_links", "check_overrides_of", "check_paths", "check_targets", "is_own"]

FLAG = "--trust"
_OWNERS = ("lightning_unified", "lightning")
_WRITERS = ("callbacks", "logger", "trainer", "memory")


def check_links(directory: Path) -> None:
    """Refuse symbolic links that lead out of `directory`.

    A resumed run would write through them.

    Raises:
        ConfigurationError: With the first such link and where it leads.
    """
    home = directory.resolve()
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise ConfigurationError(
                    f"resume={directory}: {path.relative_to(directory)} is a symbolic link to {path.resolve()}, and a resumed run would write "
                    f"there. Put a copy in its place, or add {FLAG} if it is your own."
                )


def check_overrides_of(directory: Path, overrides: Sequence[str]) -> None:
    """Refuse saved overrides that may name code or lead out of `directory`.

    Raises:
        ConfigurationError: With the first such override.
    """
    for text, override in zip(overrides, parse_overrides(list(overrides)), strict=True):
        key = key_of(override)
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            raise ConfigurationError(
                f"resume={directory}: its saved overrides hold {text}, and Hydra's own keys may run code. Remove that line from "
                f".hydra/overrides.yaml, or add {FLAG} if the run is your own."
            )
        own = OmegaConf.create()
        OmegaConf.update(own, key.partition("@")[0].replace("/", "."), override.value(), force_add=True)
        check_targets(directory, own)
        check_paths(directory, own)


def check_targets(directory: Path, config: DictConfig) -> None:
    """Refuse a `_target_` that is no training class of this package or of Lightning.

    Raises:
        ConfigurationError: With the first such target.
    """
    for name, node in targets(OmegaConf.to_container(config, resolve=False)):
        path = node["_target_"]
        if not is_own(path):
            raise ConfigurationError(
                f"resume={directory}: {name}._target_ is {path}, which is no training class of lightning_unified or Lightning. Such a name may run "
                f"any code, so it is not taken from a saved run; add {FLAG} if the run is your own."
            )


def is_own(path: Any) -> bool:
    """Return whether a `_target_` names a training class of this package or of Lightning.

    These are modules, data modules, callbacks, loggers, strategies, the Trainer, and hardware settings. Functions are not among them: some
    of Lightning's read pickles.
    """
    if not isinstance(path, str) or path.partition(".")[0] not in _OWNERS:
        return False
    import lightning as L
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from lightning_unified.hardware import HardwareSettings

    kinds = (L.LightningModule, L.LightningDataModule, L.Callback, L.Trainer, Logger, Strategy, HardwareSettings)
    found = target_of(path)
    return inspect.isclass(found) and issubclass(found, kinds) and found.__module__.partition(".")[0] in _OWNERS


def check_paths(directory: Path, config: DictConfig) -> None:
    """Refuse paths outside of `directory`.

    Callbacks, loggers, the Trainer and the memory options are checked.

    Raises:
        ConfigurationError: With the first such key.
    """
    home = directory.resolve()
    for group in _WRITERS:
        for key, value in _texts(OmegaConf.to_container(config, resolve=True).get(group), group):  # type: ignore[union-attr]
            path = Path(value).expanduser()
            leads_out = path.is_absolute() or ".." in path.parts
            if leads_out and not (path if path.is_absolute() else home / path).resolve().is_relative_to(home):
                raise ConfigurationError(
                    f"resume={directory}: {key}={value} lies outside of the run directory, and a resumed run might write there. Give {key} on the "
                    f"command line, or add {FLAG} if the run is your own."
                )


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every text below `node`."""
    if isinstance(node, str):
        yield key, node
    for name, value in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
        yield from _texts(value, f"{key}.{name}")
