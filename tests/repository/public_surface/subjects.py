"""Describe each part of the public surface as text and compare it with the record.

Internal types and help texts are left out: only names, defaults and choices that a user can write or read are frozen.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import yaml

from tests.repository.public_surface.records import doctor_lines, plan_lines, summary_lines, watch_lines
from tests.support import ROOT

__all__ = ["SUBJECTS", "Subject", "check", "parsers", "record", "recorded"]

HERE = Path(__file__).parent
PUBLIC_MODULES = ("lightning_unified", "lightning_unified.strategies", "lightning_unified.callbacks")
MODEL_MODULES = (
    "lightning_unified.data",
    *(
        f"lightning_unified.models.{name}"
        for name in ("classifier", "compressor", "finetune", "gearhead", "grpo", "wordle")
    ),
)  # names only: their arguments are keys of the configuration


# Python: the public names, their arguments and properties.


def python_lines() -> list[str]:
    """Return the public names of each public module.

    Arguments and properties are listed where a name occurs first.
    """
    lines: list[str] = []
    described: set[int] = set()
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        lines.append(f"{module_name}:")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            lines.append(f"    {name}")
            if id(value) not in described:
                described.add(id(value))
                lines.extend(f"        {line}" for line in _members(value))
    for module_name in MODEL_MODULES:
        lines.append(f"{module_name}:")
        lines.extend(f"    {name}" for name in sorted(importlib.import_module(module_name).__all__))
    return lines


def _members(value: object) -> Iterator[str]:
    """Yield the arguments of a class or function, then the properties of our classes.

    Only properties that our classes add to Lightning's are listed.
    """
    for parameter in inspect.signature(value).parameters.values():  # pyright: ignore[reportArgumentType]
        if parameter.name != "self":
            yield f"({_argument(parameter)})"
    if isinstance(value, type):
        ours = [each for each in value.__mro__ if each.__module__.startswith("lightning_unified")]
        inherited = {name for each in value.__mro__ if each not in ours for name in vars(each)}
        names = {name for each in ours for name, member in vars(each).items() if _is_property(member)}
        yield from (f".{name}" for name in sorted(names - inherited) if not name.startswith("_"))


def _is_property(member: object) -> bool:
    return isinstance(member, property) or type(member).__name__ == "cached_property"


def _argument(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    marker = ", keyword-only" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is inspect.Parameter.empty else f" = {_default(parameter.default)}"
    return f"{stars}{parameter.name}{default}{marker}"


def _default(value: object) -> str:
    """Return a default as text that is the same on every machine.

    An object is named by its type.
    """
    if value is None or isinstance(value, (str, int, float, tuple, list, dict, timedelta)):
        return repr(value)
    name = getattr(value, "__name__", type(value).__name__)
    return "made anew" if name == "_HAS_DEFAULT_FACTORY_CLASS" else name


# The command line: commands, flags, their defaults and choices.


class _Parsing(BaseException):
    """Raised in place of parsing, so that no command runs.

    A BaseException, because commands report every Exception.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def command_lines() -> list[str]:
    """Return each command with its flags, from the commands' own parsers."""
    return [line for command, parser in parsers() for line in (command, *_flags(parser))]


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command as a user writes it, with its parser."""
    from lightning_unified.cli.main import main

    for command in _commands(main):
        yield f"python -m lightning_unified {command}", _parser_of(lambda command=command: main([command]))
    for file in sorted((ROOT / "lightning_unified").glob("*/**/__main__.py")):
        name = ".".join(file.parent.relative_to(ROOT).parts)
        yield f"python -m {name}", _parser_of(lambda file=file: runpy.run_path(str(file), run_name="__main__"))


def _commands(main: Callable[[list[str]], int]) -> list[str]:
    """Return the commands that `--help` names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--help"])
    return re.findall(r"^  (\w+) {2,}", printed.getvalue(), re.MULTILINE)


def _parser_of(run: Callable[[], object]) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Parsing(self)

    with (
        patch.object(sys, "argv", ["program"]),
        patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        patch.object(argparse.ArgumentParser, "parse_known_intermixed_args", stop),
    ):
        try:
            run()
        except _Parsing as found:
            return found.parser
    raise AssertionError("the command parsed nothing with argparse")


def _flags(parser: argparse.ArgumentParser, indent: str = "    ") -> Iterator[str]:
    actions = [each for each in parser._actions if not isinstance(each, argparse._SubParsersAction)]
    for action in sorted(actions, key=lambda each: (not each.option_strings, sorted(each.option_strings), each.dest)):
        yield indent + _flag(action)
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            for name, sub in sorted(group.choices.items()):
                yield f"{indent}{name}"
                yield from _flags(sub, indent + "    ")


def _flag(action: argparse.Action) -> str:
    parts = [", ".join(action.option_strings) or action.dest]
    if action.nargs is not None and action.nargs != 0:
        parts.append(f"count {action.nargs}")
    if action.choices:
        parts.append(f"one of {', '.join(map(str, action.choices))}")
    if action.required and action.option_strings:
        parts.append("required")
    if action.default not in (None, False, [], argparse.SUPPRESS):
        parts.append(f"default {action.default}")
    return "; ".join(parts)


# The configuration: groups, choices, and the keys that each choice writes.


def configuration_lines() -> list[str]:
    """Return the keys of conf/, except `defaults` and `_target_`.

    Choices that write the same keys are listed together.
    """
    conf = ROOT / "conf"
    together: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for path in sorted(conf.rglob("*.yaml")):
        group, choice = _group_and_choice(conf, path)
        together[group, tuple(sorted(_keys_of_choice(conf, path)))].append(choice)
    lines = []
    for (group, keys), choices in sorted(together.items(), key=lambda each: (each[0][0], each[1])):
        lines.append(f"{group}={', '.join(choices)}" if group else choices[0])
        lines.extend(f"    {key}" for key in keys)
    return lines


def _group_and_choice(conf: Path, path: Path) -> tuple[str, str]:
    """Return the group and the choice of a file.

    `model/wordle/qwen.yaml` is the choice `wordle/qwen` of `model`.
    """
    *group, choice = path.relative_to(conf).with_suffix("").as_posix().split("/", 1)
    return "".join(group), choice


def _keys_of_choice(conf: Path, path: Path) -> set[str]:
    """Return the dotted keys of a file and of its `defaults` in the same group."""
    text = path.read_text(encoding="utf-8")
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    folder = path.relative_to(conf).parent.as_posix()
    package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    name = package[1] if package else ("_global_" if folder == "." else folder.replace("/", "."))
    prefix = "" if name == "_global_" else f"{name}."
    keys = {prefix + key for key in _dotted({key: value for key, value in content.items() if key != "defaults"})}
    for entry in content.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            base = entry.split("@")[0]
            folder = conf if base.startswith("/") else conf / _group_and_choice(conf, path)[0]
            keys |= _keys_of_choice(conf, folder / f"{base.lstrip('/')}.yaml")
    return keys


def _dotted(node: dict) -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in _dotted(value))
        elif key != "_target_":
            yield str(key)


# Recorded lines.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A part of the public surface: its recorded file and its describing function."""

    name: str
    describe: Callable[[], list[str]]

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.txt"


SUBJECTS = (
    Subject(name="python", describe=python_lines),
    Subject(name="commands", describe=command_lines),
    Subject(name="configuration", describe=configuration_lines),
    Subject(name="doctor", describe=doctor_lines),
    Subject(name="plan", describe=plan_lines),
    Subject(name="watch", describe=watch_lines),
    Subject(name="summary", describe=summary_lines),
)


def recorded(name: str) -> list[str]:
    """Return the recorded lines of the subject called `name`."""
    return (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def check(name: str, found: list[str]) -> None:
    """Raise `AssertionError` if `found` differs from the recorded lines.

    The message has the difference and the command that records anew.
    """
    expected = recorded(name)
    if found == expected:
        return
    difference = "\n".join(difflib.unified_diff(expected, found, "recorded", "now", n=2, lineterm=""))
    raise AssertionError(
        f"The public surface has changed: {name}.\n{difference}\n"
        "Users may rely on it. If the change is meant, describe it in CHANGELOG.md and record the surface anew: "
        "python -m tests.repository.public_surface"
    )


def record(subject: Subject) -> bool:
    """Write the lines of `subject` to its file, and return whether they have changed."""
    found = subject.describe()
    changed = not subject.path.exists() or recorded(subject.name) != found
    subject.path.write_text("\n".join(found) + "\n", encoding="utf-8")
    return changed
