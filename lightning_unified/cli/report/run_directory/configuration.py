"""The configuration of runs by dotted keys, and the keys in which several runs differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_unified.cli.report.run_directory.records import Run

__all__ = ["differences", "flat"]

# The Trainer's section repeats these groups.
_COPIES = {"trainer.strategy.": "memory.", "trainer.callbacks.": "callbacks.", "trainer.logger.": "logger."}
_HERE = "<run directory>"


def flat(run: Run) -> dict[str, Any]:
    """Return a run's configuration by dotted keys, without copies.

    A placeholder replaces the run's own directory.
    """
    keys = dict(_flat(run.config, ""))
    own = str(keys.get("run_dir") or run.directory)
    keys = {key: _moved(value, own) for key, value in keys.items()}
    return {key: value for key, value in keys.items() if not _is_copy(key, value, keys)}


def differences(runs: Sequence[Run]) -> dict[str, list[tuple[bool, Any]]]:
    """Return the keys in which runs differ, with (present, value) for each run."""
    configs = [flat(run) for run in runs]
    names = sorted({key for config in configs for key in config})
    values = {key: [(key in config, config.get(key)) for config in configs] for key in names}
    return {key: found for key, found in values.items() if any(each != found[0] for each in found[1:])}


def _flat(node: Mapping[str, Any], before: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{name}.")
        else:
            pairs.append((name, value))
    return pairs


def _moved(value: Any, own: str) -> Any:
    inside = isinstance(value, str) and (value == own or value.startswith(own + "/"))
    return _HERE + value.removeprefix(own) if inside else value


def _is_copy(key: str, value: Any, keys: Mapping[str, Any]) -> bool:
    for copy, original in _COPIES.items():
        if key.startswith(copy):
            twin = original + key.removeprefix(copy)
            return twin in keys and keys[twin] == value
    return False
