"""Describe a group of conf/ as Markdown: its choices, and each key with its default and its meaning."""

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

__all__ = ["Choice", "Key", "choices", "described", "groups", "meaning_of"]

CONF = Path(__file__).parents[2] / "conf"
_COMMENT = re.compile(r"\s#\s?(.*)$")
_PACKAGE = re.compile(r"^# @package (\S+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\*{0,2}\w+(?:, \w+)*)(?: \([^)]*\))?:\s*(.*)$")
_SEE = re.compile(r"See `(\w+)`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a choice: its dotted name, its default as written, and its meaning."""

    name: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A file of a group."""

    name: str
    comment: str
    target: str
    bases: tuple[str, ...]
    keys: tuple[Key, ...]


def groups() -> list[str]:
    """Return the groups of conf/; `""` stands for the files beside them."""
    return ["", *sorted(path.name for path in CONF.iterdir() if any(path.rglob("*.yaml")))]


@functools.cache
def choices(group: str) -> list[Choice]:
    """Return the choices of a group in alphabetical order."""
    folder = CONF / group
    found = sorted(folder.rglob("*.yaml") if group else folder.glob("*.yaml"))
    return [_choice(path, path.relative_to(folder).with_suffix("").as_posix()) for path in found]


def described(group: str) -> str:
    """Return the group as Markdown.

    Choices with the same keys share one table, with a column of defaults for each choice.
    """
    together: dict[tuple[str, ...], list[Choice]] = defaultdict(list)
    for choice in choices(group):
        together[tuple(key.name for key in choice.keys)].append(choice)
    parts = [part for same in together.values() for part in _section(group, same)]
    return "\n".join(parts)


def meaning_of(key: str, group: str, choice: Choice) -> str:
    """Return a key's meaning.

    The choice's own comment comes first, then those of the choices that it completes, of its group, and of any group.
    """
    of_group = choices(group)
    bases = [base for name in choice.bases for base in of_group if base.name == name]
    everywhere = [other for name in groups() for other in choices(name)]
    found = (
        each.meaning for place in (choice, *bases, *of_group, *everywhere) for each in place.keys if each.name == key
    )
    return next((meaning for meaning in found if meaning), "")


def _section(group: str, same: list[Choice]) -> Iterator[str]:
    yield f"## {', '.join(f'`{group}={choice.name}`' if group else f'`{choice.name}.yaml`' for choice in same)}\n"
    for choice in same:
        said = [_sentence(choice.comment)] if choice.comment else []
        said += [f"Builds `{choice.target}`."] if choice.target else []
        said += [f"Completes {', '.join(f'`{base}`' for base in choice.bases)}."] if choice.bases else []
        if said:
            yield f"{f'`{choice.name}`: ' if len(same) > 1 else ''}{' '.join(said)}\n"
    if not same[0].keys:
        return
    heads = [f"`{choice.name}`" for choice in same] if len(same) > 1 else ["default"]
    yield f"| key | {' | '.join(heads)} | meaning |"
    yield "|---" * (len(heads) + 2) + "|"
    for row in zip(*(choice.keys for choice in same), strict=True):
        meaning = next((key.meaning for key in row if key.meaning), "") or meaning_of(row[0].name, group, same[0])
        cells = [f"`{row[0].name}`", *(f"`{key.default}`" for key in row), meaning]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _choice(path: Path, name: str) -> Choice:
    text = path.read_text(encoding="utf-8")
    package = _PACKAGE.search(text)
    folder = path.relative_to(CONF).parent.as_posix()
    prefix = package[1] if package else ("_global_" if folder == "." else folder.split("/")[0])
    node = yaml.compose(text)
    leaves = list(_leaves(node, text)) if node else []
    targets = {key.rpartition(".")[0]: value for key, value, _ in leaves if key.rpartition(".")[2] == "_target_"}
    keys = tuple(
        Key(
            name=key if prefix == "_global_" else f"{prefix}.{key}",
            default=value,
            meaning=comment or _argument(targets, key),
        )
        for key, value, comment in leaves
        if not key.startswith("defaults") and key.rpartition(".")[2] != "_target_"
    )
    head = re.match(r"((?:^#.*\n)*)", text)
    comments = [line.lstrip("# ") for line in head[1].splitlines() if not line.startswith("# @package")] if head else []
    bases = tuple(
        base for base in (yaml.safe_load(text) or {}).get("defaults", []) if isinstance(base, str) and base != "_self_"
    )
    return Choice(name=name, comment=" ".join(comments), target=targets.get("", ""), bases=bases, keys=keys)


def _leaves(node: yaml.Node, text: str, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each key below `node` without sub-keys, its value as written, and its comment."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _leaves(value, text, f"{name}.")
        else:
            end = text.find("\n", value.end_mark.index)
            comment = _COMMENT.search(text[value.end_mark.index : end if end >= 0 else None])
            yield (
                name,
                text[value.start_mark.index : value.end_mark.index].strip() or "null",
                comment[1] if comment else "",
            )


def _argument(targets: dict[str, str], key: str) -> str:
    """Return the first sentence that the docstring of the key's class says about the argument of this name."""
    holder, _, argument = key.rpartition(".")
    if holder not in targets:
        return ""
    module, _, name = targets[holder].rpartition(".")
    return _documented(getattr(importlib.import_module(module), name)).get(argument, "")


def _documented(target: object) -> dict[str, str]:
    """Return the arguments that a Google-style docstring describes, each with its first sentence.

    "See `Name`" stands for what the class `Name` of the same module says, and a class goes on with its bases.
    """
    found: dict[str, str] = {}
    for each in inspect.getmro(target) if isinstance(target, type) else (target,):
        texts = [text for text in (each.__doc__, getattr(vars(each).get("__init__"), "__doc__", None)) if text]
        for names, meaning in (entry for text in texts for entry in _entries(inspect.cleandoc(text))):
            other = _SEE.match(meaning)
            elsewhere = getattr(sys.modules.get(each.__module__), other[1], None) if other else None
            for name in names:
                text = _documented(elsewhere).get(name, meaning) if elsewhere else meaning
                if _SEE.match(found.get(name, "See `it`")):
                    found[name] = text
    return found


def _entries(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names of each entry of the arguments, and the first sentence about them."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    for entry in re.split(r"\n(?=\S)", inspect.cleandoc(section[1]) if section else ""):
        if match := _ARGUMENT.match(" ".join(entry.split())):
            names = [name.strip(" *") for name in match[1].split(",")]
            yield names, _sentence(re.split(r"(?<=[.;])\s(?=[A-Z`])", match[2])[0].replace("``", "`"))


def _sentence(text: str) -> str:
    return text.rstrip(" .;") + "." if text else ""
