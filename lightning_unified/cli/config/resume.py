"""Continue a run from its saved configuration.

Overrides given beside `resume=` win and are reported.
"""

import math
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_unified.cli.config.bounded_files import read_json, read_yaml
from lightning_unified.cli.config.composition import Composed, composed, flat
from lightning_unified.cli.config.overrides import key_of, parse_overrides
from lightning_unified.cli.config.trust import FLAG, check_links, check_overrides_of, check_paths, check_targets
from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.files.atomic import put_back

__all__ = [
    "AUTO",
    "LAST",
    "OVERRIDES",
    "Change",
    "SavedRun",
    "apply_changes",
    "check_steps_left",
    "continued",
    "find_run",
    "find_sweep",
    "joined",
    "merged_overrides",
    "relocated",
    "step_of",
]

OVERRIDES = Path(".hydra", "overrides.yaml")
LAST = Path("checkpoints", "last.ckpt")
AUTO = "auto"
_MULTIRUN = "multirun.yaml"
_SECTIONS = ("run_dir", "model", "data", "hardware", "memory", "trainer")  # of every run's configuration
_OF_THIS_RUN = ("resume", "run_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """A run directory that can be continued.

    Args:
        directory: The run directory.
        config: Its resolved configuration.
        overrides: The overrides of its command line.
        checkpoint: The checkpoint to continue from.
        trusted: Whether its files may name any code, by `--trust`.
    """

    directory: Path
    config: DictConfig
    overrides: list[str]
    checkpoint: Path
    trusted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key whose value differs from the saved run's."""

    key: str
    old: Any
    new: Any


def find_run(directory: str | Path, *, trusted: bool = False) -> SavedRun:
    """Return the run in `directory`.

    Args:
        directory: The run directory.
        trusted: Leaves out the checks of `trust`.

    Raises:
        ConfigurationError: If it is not a run directory, has no checkpoint yet, or asks for more than training.
    """
    path = Path(directory).expanduser().absolute()
    if not path.is_dir():
        raise ConfigurationError(
            f"resume={directory}: {'that is a file' if path.exists() else 'there is no such directory'}; give a run directory, as in resume=runs/gearhead/2026-01-31_12-00-00."
        )
    config, overrides, checkpoint = path / "config.yaml", path / OVERRIDES, path / LAST
    for needed in (config, overrides):
        if not needed.is_file():
            raise ConfigurationError(
                f"resume={directory}: not a run directory (it has no {needed.relative_to(path)}); give the directory that a run printed as its own."
            )
    if not put_back(checkpoint):
        raise ConfigurationError(
            f"resume={directory}: that run has no checkpoints/last.ckpt to go on from; start it anew with run_dir={directory}."
        )
    run = SavedRun(
        directory=path,
        config=_mapping(config, read_yaml(config)),
        overrides=[str(each) for each in read_yaml(overrides)],
        checkpoint=checkpoint,
        trusted=trusted,
    )
    if not trusted:
        check_links(path)
        check_overrides_of(path, run.overrides)
        check_targets(path, run.config)
        check_paths(path, relocated(run.config, path))
    return run


def find_sweep(directory: str | Path, *, trusted: bool = False) -> list[str]:
    """Return the overrides of the sweep whose runs are in `directory`, without Hydra's own keys.

    Raises:
        ConfigurationError: If it is not the directory of a sweep, or if its overrides ask for more than training.
    """
    path = Path(directory).expanduser().absolute()
    record = path / _MULTIRUN
    if not record.is_file():
        raise ConfigurationError(
            f"resume={directory}: not the directory of a sweep (it has no {_MULTIRUN}); give that of a sweep's runs, or leave out -m to "
            "continue one run."
        )
    overrides = OmegaConf.select(read_yaml(record), "hydra.overrides.task")
    if not OmegaConf.is_list(overrides):
        raise ConfigurationError(
            f"{record}: it holds no overrides; start the sweep with run_dir={directory} resume=auto."
        )
    found = merged_overrides([str(each) for each in overrides], [])
    if not trusted:
        check_overrides_of(path, [text for text in found if not parse_overrides([text])[0].is_sweep_override()])
    return found


def continued(directory: Path, overrides: Sequence[str], *, trusted: bool = False) -> SavedRun | float | None:
    """Return what is left to do for the run in `directory`, which was started by `overrides`.

    Returns:
        The run to continue from its last checkpoint, if it was stopped or killed, or if `overrides` differ from its own. The best
        value of its metric (NaN if none), if it is done. None, if nothing was saved yet.

    Raises:
        ConfigurationError: If the directory holds something else than a run.
    """
    summary, own = directory / "summary.json", directory / OVERRIDES
    if not put_back(directory / LAST) or not (directory / "config.yaml").is_file():
        return None
    before = [str(each) for each in read_yaml(own)] if own.is_file() else []
    if summary.is_file() and merged_overrides(before, []) == merged_overrides(overrides, []):
        figures = read_json(summary)
        if isinstance(figures, dict) and figures.get("stopped") is None:
            best = figures.get("objective")
            return math.nan if best is None else float(best)
    return find_run(directory, trusted=trusted)


def step_of(checkpoint: Path, *, weights_only: bool = True) -> int:
    """Return the optimizer step at which a checkpoint, a file or a folder, was saved.

    Raises:
        Exception: If it cannot be read.
    """
    if checkpoint.is_dir():
        from lightning_unified.files.sharded_folder import check_pieces, read_meta

        check_pieces(checkpoint)
        return int(read_meta(checkpoint, weights_only=weights_only)["global_step"])
    import torch

    return int(torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=weights_only)["global_step"])


def _mapping(path: Path, content: Any) -> DictConfig:
    missing = [key for key in _SECTIONS if not OmegaConf.is_dict(content) or content.get(key) is None]
    if missing:
        raise ConfigurationError(f"{path}: that is not the configuration of a run: it has no {', '.join(missing)}.")
    return content


def merged_overrides(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Merge two lists of overrides: a key in `new` replaces the same key of `old`, in its place."""
    merged: dict[str, str] = {}
    for text, override in zip((*old, *new), parse_overrides([*old, *new]), strict=True):
        if key_of(override) not in _OF_THIS_RUN:
            merged[key_of(override)] = text
    return list(merged.values())


def joined(run: SavedRun, given: Sequence[str]) -> tuple[Composed, list[Change]]:
    """Return the configuration that continues `run`, and the changes that `given` makes.

    Call it inside `searching`.

    The saved configuration contains detected hardware and values of earlier versions of the shipped files. So it
    changes only where `given` makes a difference: compose without `given`, compose with it, apply the difference. A
    newly chosen group replaces the saved one whole.
    """
    hardware = f"hardware={run.config.hardware.name}"
    own = merged_overrides([hardware], run.overrides)
    before, after = composed(own), composed(merged_overrides(own, given))
    config = run.config.copy()
    OmegaConf.set_struct(config, False)
    for group, choice in after.choices.items():
        if group in after.config and before.choices.get(group) != choice:
            config[group] = after.config[group]
    changes = apply_changes(config, before.config, after.config)
    return Composed(config=config, choices=after.choices), changes


def apply_changes(config: DictConfig, before: DictConfig, after: DictConfig) -> list[Change]:
    """Apply the differences between `before` and `after` to `config`, and return them."""
    old, new = flat(_resolved(before)), flat(_resolved(after))
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if key.partition(".")[0] in (*_OF_THIS_RUN, "name") or old.get(key) == new.get(key):
            continue
        changes.append(Change(key=key, old=OmegaConf.select(config, key, default=old.get(key)), new=new.get(key)))
        if key in new:
            OmegaConf.update(config, key, new[key], force_add=True)
        else:
            parent, _, last = key.rpartition(".")
            node = OmegaConf.select(config, parent) if parent else config
            if OmegaConf.is_dict(node) and last in node:
                del node[last]
    return changes


def _resolved(config: DictConfig) -> DictConfig:
    copy = config.copy()
    OmegaConf.set_struct(copy, False)
    copy["run_dir"] = "run_dir"  # holds the time of day, which differs between any two compositions
    OmegaConf.resolve(copy)
    return copy


def relocated(config: DictConfig, directory: Path) -> DictConfig:
    """Return `config` with its paths rewritten to `directory`.

    This is needed if the run was moved, or if `run_dir` was given.
    """
    old, new = str(config.run_dir), str(directory)

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(member) for key, member in value.items()}
        if isinstance(value, list):
            return [moved(member) for member in value]
        inside = isinstance(value, str) and (value == old or value.startswith(old + os.sep))
        return new + value.removeprefix(old) if inside else value

    return DictConfig(moved(OmegaConf.to_container(config)))


def check_steps_left(run: SavedRun, max_steps: int) -> int:
    """Return the number of optimizer steps that `run` has done.

    Raises:
        CheckpointError: If its checkpoint cannot be read.
        ConfigurationError: If `run` has already done `max_steps` (-1: no limit).
    """
    try:
        done = step_of(run.checkpoint, weights_only=not run.trusted)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and not run.trusted and "Weights only load failed" in str(error):
            raise CheckpointError(
                f"{run.checkpoint} holds Python objects beside tensors and plain data, which may run code when they are read; add {FLAG} if the "
                "run is your own."
            ) from error
        others = _readable_beside(run)
        which = f"copy {others[0]}" if len(others) == 1 else f"copy one of {', '.join(others)}"
        rest = (
            f"{which} over it"
            if others
            else "no other checkpoint beside it can be read: copy an undamaged one over it, or begin a new run with another run_dir"
        )
        raise CheckpointError(f"{run.checkpoint} cannot be read ({_reason(error)}); {rest}.") from error
    if 0 <= max_steps <= done:
        raise ConfigurationError(
            f"resume={run.directory}: that run has already done its {done} steps; add trainer.max_steps={2 * done} to go on."
        )
    return done


def _readable_beside(run: SavedRun) -> list[str]:
    """Return the names of the run's other checkpoints that can be read."""
    names: list[str] = []
    for path in sorted(run.checkpoint.parent.glob("*.ckpt")):
        with suppress(Exception):  # damaged files raise almost any class
            if path != run.checkpoint and step_of(path, weights_only=not run.trusted) >= 0:
                names.append(path.name)
    return names


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if kind == "ShardedFolderError" else kind  # torch's texts are long
