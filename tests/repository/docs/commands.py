"""Check a command of the manual unrun: parser, configuration, Makefile, extras, files."""

import argparse
import contextlib
import functools
import io
import re
import shlex
import tomllib
from collections.abc import Iterator

from lightning_unified.cli.config.composition import composed, flat, groups, searching
from lightning_unified.cli.config.overrides import key_of, parse_overrides, single_run
from tests.repository.docs.blocks import ROOT
from tests.repository.public_surface.subjects import parsers

__all__ = ["commands_of", "problem_of"]

PLAIN = {
    "cat",
    "cd",
    "cp",
    "curl",
    "echo",
    "eval",
    "export",
    "git",
    "head",
    "ls",
    "mkdir",
    "pytest",
    "rm",
    "source",
    "sudo",
    "uv",
    ".",
}
SAME_KEYS = {"memory", "hardware"}  # groups whose choices have the same keys: composing each would test nothing more
PYTHON = re.compile(r"(?:.*/)?python[\d.]*$")


def commands_of(code: str) -> Iterator[list[str]]:
    """Yield the commands of a shell block.

    Comments, prompts, leading variables, pipes and redirections are left out.
    """
    prompted = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
    joined = ("\n".join(prompted) if prompted else code).replace("\\\n", " ")
    for line in joined.splitlines():
        for piece in _pieces(line):
            words = [word for word in piece if word not in {"…", "..."}]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


def _pieces(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(
        re.sub(r"<([^<>|&]+)>", "PLACE", line).replace("(…)", ""), posix=True, punctuation_chars="|&;<>"
    )
    lexer.whitespace_split = True
    piece: list[str] = []
    for word in lexer:
        if word in {"|", "||", "&&", ";", "&"}:
            yield piece
            piece = []
        elif set(word) <= set("<>"):
            next(lexer, None)  # the file of a redirection
        else:
            piece.append(word)
    yield piece


def problem_of(words: list[str]) -> str:
    """Return what is wrong with a command, or `""`."""
    program, *rest = words
    if PYTHON.match(program):
        return _of_python(rest)
    if program == "torchrun":
        return _of_torchrun(rest)
    if program.endswith("lightning-unified"):
        return _of_module("lightning_unified", rest)
    if program == "make":
        return _of_make(rest)
    if program.endswith("pip"):
        return _of_pip(rest)
    if program in PLAIN or (ROOT / program).is_file():
        return ""
    return f"{program} is no program that the manual's test knows; write ```text if this is an output."


def _of_python(rest: list[str]) -> str:
    if rest[:1] == ["-m"]:
        return _of_pip(rest[2:]) if rest[1] == "pip" else _of_module(rest[1], rest[2:])
    if rest and rest[0] == "train.py":
        return _of_train(rest[1:])
    if (
        not rest
        or rest[0] in {"-c", "-V", "--version"}
        or (ROOT / rest[0]).is_file()
        or not rest[0].startswith(("benchmarks", "docs", "tests"))
    ):
        return ""
    return f"{rest[0]}: there is no such file."


def _of_module(module: str, rest: list[str]) -> str:
    if module == "lightning_unified":
        command = rest[0] if rest and rest[0] in {"plan", "doctor", "watch", "report", "consolidate"} else "train"
        rest = rest[1:] if rest[:1] == [command] else rest
        if command == "train":
            return _of_train(rest)
        if command == "plan":
            return _of_plan(rest)
        module = f"lightning_unified {command}"
    known = _parsers().get(f"python -m {module}")
    if known:
        return _parsed(known, rest)
    path = ROOT.joinpath(*module.split("."))
    if (
        module.split(".")[0] not in {"benchmarks", "tests", "lightning_unified", "docs"}
        or path.is_dir()
        or path.with_suffix(".py").is_file()
    ):
        return ""
    return f"python -m {module}: there is no such module."


def _of_train(rest: list[str]) -> str:
    flags = _parsed(_parsers()["python -m lightning_unified train"], [word for word in rest if word != "--trust"])
    sweep = "-m" in rest or "--multirun" in rest
    return flags or _composes(tuple(word for word in rest if "=" in word and not word.startswith("-")), sweep=sweep)


def _of_plan(rest: list[str]) -> str:
    from lightning_unified.cli.plan.arguments import parse

    try:
        asked = parse(rest)
    except ValueError as error:
        return str(error)
    return _composes(asked.overrides, sweep=False)


def _composes(overrides: tuple[str, ...], *, sweep: bool) -> str:
    parsed = parse_overrides([each.replace("PLACE", "place").replace("…", "x") for each in overrides])
    if not sweep and any(each.is_sweep_override() for each in parsed):
        return f"{' '.join(overrides)} is a sweep without -m"
    own = [each for each in parsed if not key_of(each).startswith("hydra")]
    of_groups = {key_of(each): single_run(each) for each in own if key_of(each) in _groups()}
    wrong = [
        text
        for group, text in of_groups.items()
        if text.split("=", 1)[-1].strip("'\"") not in [*_groups()[group], "null"]
    ]
    if wrong:
        return f"there is no choice {', '.join(wrong)}"
    chosen = tuple(text for group, text in of_groups.items() if group not in SAME_KEYS)
    try:
        keys = _keys(chosen)
    except Exception as error:
        return f"{' '.join(chosen)}: {error}"
    unknown = [key_of(each) for each in own if key_of(each) not in {*keys, *_groups()} and not each.is_add()]
    return f"there is no key {', '.join(unknown)}" if unknown else ""


@functools.cache
def _keys(chosen: tuple[str, ...]) -> set[str]:
    """Return the keys, and the keys that hold keys, of the configuration of these choices."""
    with searching(str(ROOT / "conf")):
        leaves = flat(composed(list(chosen)).config)
    return {".".join(key.split(".")[:count]) for key in leaves for count in range(1, key.count(".") + 2)}


@functools.cache
def _groups() -> dict[str, list[str]]:
    with searching(str(ROOT / "conf")):
        return groups()


def _of_torchrun(words: list[str]) -> str:
    from torch.distributed.run import get_args_parser

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parsed = get_args_parser().parse_args(words)
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
    return _of_python([parsed.training_script, *parsed.training_script_args])


def _of_make(rest: list[str]) -> str:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wrong = [word for word in rest if "=" not in word and not word.startswith("-") and word not in targets]
    arguments = next((word.removeprefix("ARGS=") for word in rest if word.startswith("ARGS=")), "")
    if wrong:
        return f"make {wrong[0]}: the Makefile has no such target."
    return _of_train(shlex.split(arguments)) if rest[0].startswith("train") and arguments else ""


def _of_pip(rest: list[str]) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = [
        extra
        for word in rest
        for found in re.findall(r"(?:lightning-unified|^\.|\.whl)\[([\w,-]+)\]", word)
        for extra in found.split(",")
    ]
    wrong = [f"the extra {extra} does not exist" for extra in named if extra not in extras]
    files = [rest[at + 1] for at, word in enumerate(rest[:-1]) if word in {"-r", "--requirement", "-c", "--constraint"}]
    return "; ".join([*wrong, *(f"{file} does not exist" for file in files if not (ROOT / file).is_file())])


@functools.cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    return dict(parsers())


def _parsed(parser: argparse.ArgumentParser, rest: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args([word.strip("[]") for word in rest])
    except SystemExit as stop:
        return said.getvalue().strip() if stop.code else ""
    except ValueError as error:  # our own parsers raise ConfigurationError
        return str(error)
    return ""
