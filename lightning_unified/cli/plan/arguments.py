"""What `plan` was asked on the command line: flags, and overrides as `train` takes them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from typing_extensions import override

from lightning_unified.cli.config.composition import groups
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.errors import ConfigurationError

__all__ = ["FLAGS", "Asked", "help_text", "parse"]

FLAGS: dict[str, tuple[str, str]] = {
    "--module": ("PKG.MOD:NAME", "a LightningModule's class, or a function that returns one; FILE.py:NAME too"),
    "--kwargs": ("KEY=VALUE …", "what it is called with; overrides stand before this flag"),
    "--batch": ("PKG.MOD:NAME", "a function that returns a batch, or an object that is one"),
    "--batch-shape": ("SHAPE …", "a batch by its shapes: input_ids=8x512:int64 labels=8x512:int64, or 32x3x224x224"),
    "--generate": ("TOKENS", "also what generating so many takes, by formula, for a model that generates"),
    "--rows": ("ROWS", "of that, at once; the batch's if not given"),
    "--prompt": ("TOKENS", "before them; as long as the batch's rows if not given"),
    "--fits-where": ("", "what every simulated machine would do"),
    "--json": ("", "print JSON for scripts, and nothing else"),
    "--markdown": ("FILE", "also write the page as Markdown"),
    "--png": ("FILE", "also draw it"),
    "--calibration": ("show|clear", "what measured steps have corrected on this machine; clear forgets it"),
    "--shell-completion": ("install=bash", "print what a shell needs to complete"),
    "--help": ("", "this page"),
}
"""Every flag with what follows it and what it is for."""

_HEAD = """\
Say what a training step will take before there is one, and the fastest way to run it inside a memory budget.
No weight is allocated, no data is read, nothing is written.

  python -m lightning_unified plan [group=choice …] [key=value …] [flags]

  plan memory=large hardware=mps model=gearhead-34m         an Apple GPU that may not be here
  plan model=gearhead simulate=m2-16gb memory.budget=6GiB   a machine by its name
  plan model=gearhead-118m --fits-where                     every machine that can be simulated
  plan model=gearhead --generate 128 --rows 16              what generating takes as well
  plan hardware=cpu --module my.models:Net --kwargs width=512 --batch-shape 32x3x224x224
  plan --module train.py:build --batch train.py:example_batch --png plan.png

Overrides are those of train (python -m lightning_unified train --help); groups:
{groups}

Flags
{flags}

Completion in bash: eval "$(python -m lightning_unified plan --shell-completion install=bash)"
Exit codes: 0 planned; 1 nothing fits, with a table of what would; 2 what was asked makes no sense.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The command line, taken apart.

    Attributes:
        overrides: As given, unchecked.
        module: `pkg.mod:Name`, or None for what `model=` says.
        kwargs: `key=value` for it.
        batch: `pkg.mod:name`, or None.
        batch_shape: Shapes, each `[key=]2x512[:int64]`.
        generate: Tokens to generate, or None.
        rows: Sequences that are generated at once, or None.
        prompt: Tokens of a prompt, or None.
        fits_where: Whether all simulated machines are asked.
        json: Whether JSON is printed.
        markdown: A file to write, or None.
        png: A file to draw, or None.
        calibration: What to do with the corrections, or None.
        shell_completion: What a shell asks, or None.
        help: Whether only the help is wanted.
    """

    overrides: tuple[str, ...] = ()
    module: str | None = None
    kwargs: tuple[str, ...] = ()
    batch: str | None = None
    batch_shape: tuple[str, ...] = ()
    generate: int | None = None
    rows: int | None = None
    prompt: int | None = None
    fits_where: bool = False
    json: bool = False
    markdown: Path | None = None
    png: Path | None = None
    calibration: Literal["show", "clear"] | None = None
    shell_completion: str | None = None
    help: bool = False


class _Parser(argparse.ArgumentParser):
    """Refuses as every other command does: one message, the nearest name, exit code 2."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see python -m lightning_unified plan --help.")


def parse(arguments: Sequence[str]) -> Asked:
    """Return `arguments` taken apart.

    Raises:
        ConfigurationError: If a flag is unknown, lacks its value, or contradicts another.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[])
    for flag in ("--fits-where", "--json"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    for flag in ("--module", "--batch"):
        parser.add_argument(flag)
    parser.add_argument("-sc", "--shell-completion")
    for flag in ("--generate", "--rows", "--prompt"):
        parser.add_argument(flag, type=int)
    for flag in ("--markdown", "--png"):
        parser.add_argument(flag, type=Path)
    for flag in ("--kwargs", "--batch-shape"):
        parser.add_argument(flag, nargs="+", action="extend", default=[])
    parser.add_argument("--calibration", choices=("show", "clear"))
    given, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]}: there is no such flag{did_you_mean(unknown[0], FLAGS)} Overrides are written key=value, without dashes."
        )
    texts = {name: tuple(getattr(given, name)) for name in ("overrides", "kwargs", "batch_shape")}
    asked = replace(Asked(**vars(given)), **texts)
    _check(asked)
    return asked


def _check(asked: Asked) -> None:
    """Refuse flags that make no sense together."""
    if asked.batch is not None and asked.batch_shape:
        raise ConfigurationError("--batch and --batch-shape both say what a batch is; give one of them.")
    for flag in ("generate", "rows", "prompt"):
        if (count := getattr(asked, flag)) is not None and count < 1:
            raise ConfigurationError(f"--{flag} {count}: give 1 or more.")
    if asked.generate is None and (asked.rows, asked.prompt) != (None, None):
        raise ConfigurationError("--rows and --prompt are those of a generation; give --generate with them.")
    if asked.module is None and asked.kwargs:
        raise ConfigurationError(
            "--kwargs is what --module is called with; give --module pkg.mod:Name, or model.key=value."
        )
    if asked.module is not None and asked.batch is None and not asked.batch_shape:
        raise ConfigurationError(
            f"--module {asked.module} needs a batch to plan for; give --batch pkg.mod:function, or --batch-shape as in "
            "input_ids=8x512:int64 labels=8x512:int64."
        )


def help_text() -> str:
    """Return the help; call it inside `searching`."""
    shown = [
        f"  {name:<11}{', '.join(choices)}"
        for name, choices in sorted(groups().items())
        if not name.startswith(("hydra", "platform"))
    ]
    flags = [f"  {f'{flag} {value}':<32}{words}" for flag, (value, words) in FLAGS.items()]
    return _HEAD.format(groups="\n".join(shown), flags="\n".join(flags))
