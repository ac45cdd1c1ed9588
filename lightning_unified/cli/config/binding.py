"""Check every `_target_` node against its signature: argument names and types."""

import inspect
import logging
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union
from unittest.mock import patch

from omegaconf import DictConfig, OmegaConf

from lightning_unified.cli.config.extras import extra_for, missing_packages
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.errors import ConfigurationError, LightningUnifiedError

__all__ = ["arguments_of", "check_binding", "make", "target_of", "targets"]


def targets(node: Any, *, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name and the content of every mapping with a `_target_`."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield name, node
        for key, value in node.items():
            yield from targets(value, name=f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):  # Hydra instantiates the entries of lists as well
        for index, value in enumerate(node):
            yield from targets(value, name=f"{name}.{index}")


def target_of(path: str) -> Callable[..., Any]:
    """Return the object that a dotted `_target_` names.

    Raises:
        ConfigurationError: If it cannot be imported.
    """
    from hydra.utils import get_object

    try:
        with patch.object(logging.getLogger("hydra.utils"), "disabled", new=True):  # it logs what is raised as well
            return get_object(path)
    except Exception as error:
        for package in missing_packages(error):
            if extra := extra_for(package, target=path):
                raise ConfigurationError(
                    f"{path} needs the package {package}, which is not installed: pip install 'lightning-unified[{extra}]'."
                ) from error
        raise ConfigurationError(f"_target_: {path} cannot be imported ({error}).") from error


def arguments_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments that `target` takes by name, in order."""
    parameters = inspect.signature(target).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    }


def make(name: str, node: Any, **objects: Any) -> Any:
    """Instantiate `node`, with `objects` as further arguments, and convert its errors into ours.

    Raises:
        ConfigurationError: If the target refuses its arguments; the message names `name`.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        try:
            return instantiate(node, _convert_="all", _partial_=True)(**objects)
        except InstantiationException as error:
            raise (error.__cause__ or error) from None
    except LightningUnifiedError:
        raise
    except (ValueError, TypeError, FileNotFoundError, ImportError, MisconfigurationException) as error:
        text = str(error)
        raise ConfigurationError(text if text.startswith(f"{name}.") else f"{name}: {text}") from error


def check_binding(config: DictConfig) -> None:
    """Check every `_target_` node of `config`, resolved, against its target.

    Raises:
        ConfigurationError: If an argument is unknown, missing, or of a type that the target's annotation excludes, or a number is
            NaN or, in a node of this package, infinite.
    """
    seen = set()
    container = OmegaConf.to_container(config, resolve=True)
    _check_finite("", container, own=False)
    for name, node in targets(container):
        if id(node) not in seen:
            seen.add(id(node))
            _check_node(name, node)


def _check_finite(name: str, value: Any, *, own: bool) -> None:
    """Raise for a number that is NaN, or infinite within a target of this package."""
    if isinstance(value, dict):
        own = own or str(value.get("_target_", "")).startswith("lightning_unified.")
        for key, entry in value.items():
            _check_finite(f"{name}.{key}" if name else str(key), entry, own=own)
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            _check_finite(f"{name}.{place}", entry, own=own)
    elif isinstance(value, float) and (math.isnan(value) or (own and math.isinf(value))):
        raise ConfigurationError(f"{name}={value}: it must be a finite number.")


def _check_node(name: str, node: Mapping[str, Any]) -> None:
    target = target_of(node["_target_"])
    arguments = arguments_of(target)
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in arguments.values())
    given = {key: value for key, value in node.items() if not key.startswith("_")}
    for key in given:
        if key not in arguments and not open_ended:
            raise ConfigurationError(
                f"{name}.{key}: {node['_target_']} takes no such argument{did_you_mean(key, arguments)}"
            )
    missing = [key for key, parameter in arguments.items() if parameter.default is parameter.empty and key not in given]
    if missing and not node.get("_partial_") and not open_ended:
        raise ConfigurationError(f"{name}: {node['_target_']} also needs {', '.join(missing)}.")
    hints = _hints(target)
    for key, value in given.items():
        if key in hints and not _fits(value, hints[key]):
            raise ConfigurationError(f"{name}.{key}={value}: {_wanted(value, hints[key])}")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of `target`'s arguments, empty where they cannot be evaluated."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}


def _members(hint: Any) -> list[Any]:
    """Return the alternatives of a union, or the annotation itself."""
    if typing.get_origin(hint) in {Union, types.UnionType}:
        return [member for each in typing.get_args(hint) for member in _members(each)]
    return [hint]


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, member) for member in _members(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    """Return whether `value` may have the type `hint`.

    Only an annotation that is a plain type can refuse a value.
    """
    if isinstance(value, dict):  # a node with a `_target_` becomes an object of a type that is unknown here
        return True
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if origin in {list, tuple, set, Sequence}:
        return isinstance(value, list)
    if inspect.isclass(hint) and hint is not object:
        return isinstance(value, (str, hint))  # Path from text, say
    return True


def _wanted(value: Any, hint: Any) -> str:
    """Return in words the values that an annotation allows."""
    choices = [
        str(choice)
        for member in _members(hint)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    ]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    words = [
        names.get(member, getattr(member, "__name__", str(member)))
        for member in _members(hint)
        if typing.get_origin(member) is not Literal
    ]
    if choices:
        words.append(choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
    text = "it must be " + " or ".join(words)
    return text + did_you_mean(str(value), choices)
