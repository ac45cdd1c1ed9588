"""Check every override before anything runs; suggest the nearest valid group, choice or key."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_unified.cli.config.composition import Composed, composed, flat, groups
from lightning_unified.cli.config.nearest import did_you_mean, nearest
from lightning_unified.errors import ConfigurationError

__all__ = ["check_overrides", "key_of", "parse_overrides", "quoted", "single_run", "swept_values", "with_quoted_paths"]


_PATHS = ("resume", "run_dir")


_MOVED = {
    "hardware.compile": "memory.compile: auto, blocks (the repeated blocks), whole (the module's children) or false"
}


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return `overrides` parsed by Hydra's grammar.

    Raises:
        ConfigurationError: If an override is not of the form `key=value`.
    """
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            message = str(error).splitlines()[0]
            raise ConfigurationError(
                f"{text!r} is not an override ({message}); write key=value, as in memory=small or data.batch_size=64, and "
                "a value with unusual characters within quotes of its own, as in 'run_dir=\"été\"'."
            ) from error
    return parsed


def quoted(path: str | Path) -> str:
    """Return `path` in quotes, as Hydra's grammar reads any text."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def with_quoted_paths(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` with quotes around the paths that Hydra's grammar cannot read.

    Only `resume` and `run_dir` hold such paths.

    The folders of a sweep's runs are such paths: `resume=runs/sweep/2026-01-31_12-00-00/memory=debug,model.width=64`.
    """
    return [_with_quoted_path(text) for text in overrides]


def _with_quoted_path(text: str) -> str:
    key, _, value = text.partition("=")
    if key not in _PATHS or not value or set(value) & set("'\"") or "$" in value:
        return text
    path = Path(value).expanduser()
    try:
        is_read = OverridesParser.create().parse_override(text).value() == value
    except HydraException:  # the grammar has no such path
        return f"{key}={quoted(path)}"
    return f"{key}={quoted(path)}" if not is_read and path.is_dir() else text


def key_of(override: Override) -> str:
    """Return the group's name or the dotted key that `override` sets."""
    return override.key_or_group


def single_run(override: Override) -> str:
    """Return `override` as a single run sees it, with the first value of a sweep."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={swept_values(override)[0]}"


def swept_values(override: Override) -> list[str]:
    """Return the values of a sweep.

    An interval, from which only some sweepers can draw, gives its start.
    """
    if override.is_interval_sweep():
        interval = override.value()
        return [str(interval.start)]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    return [str(value) for value in override.sweep_string_iterator()]


def check_overrides(overrides: Sequence[str], *, multirun: bool) -> Composed:
    """Compose `overrides`, each sweep at its first value; call it inside `searching`.

    Raises:
        ConfigurationError: If a group, a choice or a key does not exist, with the nearest that does, or if the
            overrides do not compose.
    """
    parsed = parse_overrides(overrides)
    sweeps = [override for override in parsed if override.is_sweep_override()]
    if sweeps and not multirun:
        text = sweeps[0].input_line
        raise ConfigurationError(
            f"{text}: several values are a sweep; add -m, or quote the list as in '{key_of(sweeps[0])}=[a,b]'."
        )
    known = groups()
    of_groups = [override for override in parsed if key_of(override) in known]
    for override in of_groups:
        _check_choice(override, known[key_of(override)])
    try:
        return _composed([single_run(override) for override in parsed])
    except ConfigurationError:  # a composition takes a tenth of a second: the second one is for errors only
        chosen = _composed([single_run(override) for override in of_groups])
        for override in parsed:
            if override not in of_groups and not override.is_add() and not override.is_force_add():
                _check_key(override, chosen.config, known)
        raise


def _check_choice(override: Override, choices: Sequence[str]) -> None:
    group = key_of(override)
    if override.is_delete():
        if group in _composed([]).config:
            raise ConfigurationError(f"~{group}: a run needs one; {group} is one of {', '.join(choices)}.")
        return
    if override.is_sweep_override():
        values = [value.strip("'\"") for value in swept_values(override)]
    else:
        value = override.value()
        values = [str(each) for each in value] if isinstance(value, list) else ["null" if value is None else str(value)]
    for value in values:
        if value not in choices:
            raise ConfigurationError(
                f"{group}={value}: there is no such choice{did_you_mean(value, choices)} {group} is one of {', '.join(choices)}."
            )


def _check_key(override: Override, config: DictConfig, known: dict[str, list[str]]) -> None:
    key = key_of(override)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")) or _exists(config, key):
        return
    if key in _MOVED:
        raise ConfigurationError(f"{key} has become {_MOVED[key]}.")
    valid = [*flat(config), *(str(name) for name in config), *(name for name in known if not name.startswith("hydra/"))]
    hint = did_you_mean(key, valid) if nearest(key, valid) else "; see python train.py --help."
    raise ConfigurationError(f"{key}: there is no such key{hint}")


def _exists(config: DictConfig, key: str) -> bool:
    parent, _, last = key.rpartition(".")
    try:
        node = OmegaConf.select(config, parent, throw_on_missing=False) if parent else config
    except OmegaConfBaseException:
        return False
    return OmegaConf.is_dict(node) and last in node.keys()  # noqa: SIM118 - `in` is False for a missing value


def _composed(overrides: Sequence[str]) -> Composed:
    try:
        return composed(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError("\n".join(line for line in str(error).splitlines() if line.strip())) from error
