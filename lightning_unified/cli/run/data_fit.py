"""Check that data and model belong together before the first batch.

A first batch that lacks an entry of the model gets an explanation.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from lightning_unified.errors import ConfigurationError

__all__ = ["check_batches", "check_interpolations", "lacking"]

_DIMENSIONS = ("", "(B)", "(B, T)")


def check_interpolations(config: DictConfig, choices: Mapping[str, Any]) -> None:
    """Check that every key that refers to another finds it: a model takes keys of its own data.

    Raises:
        ConfigurationError: If a key refers to one that does not exist.
    """
    try:
        OmegaConf.to_container(config, resolve=True)
    except InterpolationKeyError as error:
        wanted = str(error).partition("'")[2].partition("'")[0]
        group = wanted.partition(".")[0]
        raise ConfigurationError(
            f"{error.full_key} takes the value of {wanted}, which {group}={choices.get(group)} does not have. {_remedy(choices)}"
        ) from error


def check_batches(data: Any, module: Any, choices: Mapping[str, Any]) -> None:
    """Check the entries of the data's batches against those that the module reads.

    Args:
        data: A data module; its `example_batch()`, if it has one, returns a batch without reading a file.
        module: A module; its `batch_dims`, if it has them, are names of entries with their number of dimensions.
        choices: The chosen option of each configuration group.

    Raises:
        ConfigurationError: If an entry is missing, or has other dimensions.
    """
    needed, example = getattr(module, "batch_dims", {}), getattr(data, "example_batch", None)
    batch = example() if needed and callable(example) else None
    if not isinstance(batch, Mapping):
        return
    there = {name: getattr(value, "ndim", 0) for name, value in batch.items()}
    if any(there.get(name) != dims for name, dims in needed.items()):
        raise ConfigurationError(
            f"data={choices.get('data')} makes batches of {_listed(there)}, and model={choices.get('model')} reads {_listed(needed)}. "
            f"{_remedy(choices)}"
        )


def lacking(error: KeyError, fields: tuple[str, ...], choices: Mapping[str, Any]) -> ConfigurationError | None:
    """Return the error of a step that reads an entry missing from its first batch.

    None if the `KeyError` has another cause.

    Args:
        error: The error of the step.
        fields: Names of the entries of the first batch.
        choices: The chosen option of each configuration group.
    """
    key = error.args[0] if error.args else None
    if not fields or not isinstance(key, str) or key in fields:
        return None
    return ConfigurationError(
        f"the step of model={choices.get('model')} reads {key!r}, and the batches of data={choices.get('data')} have "
        f"{', '.join(fields)}. {_remedy(choices)}"
    )


def _remedy(choices: Mapping[str, Any]) -> str:
    return f"Leave out data= to take the data of model={choices.get('model')}, or give other data of its kind."


def _listed(dims: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {_DIMENSIONS[count] if count < len(_DIMENSIONS) else ''}".strip() for name, count in dims.items()
    )
