"""The command line of `plan`: its flags, its help, and overrides as `train` takes them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from typing_extensions import override

from lightning_unified.cli.config.help import groups_in_words
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.errors import ConfigurationError

__all__ = ["FLAGS", "Asked", "help_text", "parse"]

FLAGS: dict[str, tuple[str, str]] = {
    "--module": ("PKG.MOD:NAME", "a LightningModule class, or a function that returns a module; also FILE.py:NAME"),
    "--kwargs": ("KEY=VALUE …", "arguments of --module; put overrides before this flag"),
    "--batch": ("PKG.MOD:NAME", "a function that returns a batch, or a batch object"),
    "--batch-shape": ("SHAPE …", "a batch by its shapes: input_ids=8x512:int64 labels=8x512:int64, or 32x3x224x224"),
    "--generate": ("TOKENS", "also compute the memory of generating so many tokens, by formula"),
    "--rows": ("ROWS", "sequences generated at once; default: the batch's rows"),
    "--prompt": ("TOKENS", "tokens of each prompt; default: the length of the batch's rows"),
    "--link": (
        "LINK",
        "the link between several devices: nvlink4, pcie5, …, or bytes a second; default: the device's own",
    ),
    "--fits-where": ("", "also plan for every simulated machine"),
    "--json": ("", "print JSON for scripts, and nothing else"),
    "--markdown": ("FILE", "also write the page as Markdown"),
    "--png": ("FILE", "also draw the plan"),
    "--calibration": ("show|clear", "show the corrections from measured steps on this machine, or delete them"),
    "--shell-completion": ("install=bash", "print the shell's completion script"),
    "--help": ("", "print this page"),
}
"""Every flag with its value and its help text."""

_HEAD = """\
Predict the memory and time of a training step, and choose the fastest way to run it inside a memory budget.
No weight is allocated, no data is read, nothing is written.

  python -m lightning_unified plan [group=choice …] [key=value …] [flags]

  plan memory=large hardware=mps model=gearhead-34m         an Apple GPU, present or not
  plan model=gearhead simulate=m2-16gb memory.budget=6GiB   a machine by its name
  plan model=gearhead-118m --fits-where                     every simulated machine
  plan model=gearhead --generate 128 --rows 16              training and generation
  plan hardware=cuda memory.budget=80GiB trainer.devices=8 trainer.strategy=unified_fsdp   one of eight GPUs
  plan hardware=cpu --module my.models:Net --kwargs width=512 --batch-shape 32x3x224x224
  plan --module train.py:build --batch train.py:example_batch --png plan.png

Overrides are those of train (python -m lightning_unified train --help); groups:
{groups}

Flags
{flags}

Completion in bash: eval "$(python -m lightning_unified plan --shell-completion install=bash)"
Exit codes: 0 planned; 1 nothing fits (the page lists the need of each setting); 2 invalid request.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The parsed command line.

    Attributes:
        overrides: Overrides as given, unchecked.
        module: `pkg.mod:Name`, or None to use `model=`.
        kwargs: `key=value` arguments of `module`.
        batch: `pkg.mod:name`, or None.
        batch_shape: Shapes, each `[key=]2x512[:int64]`.
        generate: Tokens to generate, or None.
        rows: Sequences that are generated at once, or None.
        prompt: Tokens of a prompt, or None.
        link: The link between several devices, or None for the published one.
        fits_where: Whether to plan for all simulated machines.
        json: Whether to print JSON.
        markdown: The Markdown file to write, or None.
        png: The picture to draw, or None.
        calibration: Whether to show or to clear the corrections, or None.
        shell_completion: The request of a shell, or None.
        help: Whether to print the help only.
    """

    overrides: tuple[str, ...] = ()
    module: str | None = None
    kwargs: tuple[str, ...] = ()
    batch: str | None = None
    batch_shape: tuple[str, ...] = ()
    generate: int | None = None
    rows: int | None = None
    prompt: int | None = None
    link: str | None = None
    fits_where: bool = False
    json: bool = False
    markdown: Path | None = None
    png: Path | None = None
    calibration: Literal["show", "clear"] | None = None
    shell_completion: str | None = None
    help: bool = False


class _Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigurationError`, as every other command does, instead of exiting."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see python -m lightning_unified plan --help.")


def parse(arguments: Sequence[str]) -> Asked:
    """Parse the command line.

    Raises:
        ConfigurationError: If a flag is unknown, lacks its value, or contradicts another.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[], help="key=value and group=choice, as train takes them")
    for flag in ("--fits-where", "--json"):
        parser.add_argument(flag, action="store_true", help=FLAGS[flag][1])
    parser.add_argument("-h", "--help", action="store_true", help=FLAGS["--help"][1])
    for flag in ("--module", "--batch", "--link"):
        parser.add_argument(flag, help=FLAGS[flag][1])
    parser.add_argument("-sc", "--shell-completion", help=FLAGS["--shell-completion"][1])
    for flag in ("--generate", "--rows", "--prompt"):
        parser.add_argument(flag, type=int, help=FLAGS[flag][1])
    for flag in ("--markdown", "--png"):
        parser.add_argument(flag, type=Path, help=FLAGS[flag][1])
    for flag in ("--kwargs", "--batch-shape"):
        parser.add_argument(flag, nargs="+", action="extend", default=[], help=FLAGS[flag][1])
    parser.add_argument("--calibration", choices=("show", "clear"), help=FLAGS["--calibration"][1])
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
    """Refuse flags that contradict or lack each other."""
    if asked.batch is not None and asked.batch_shape:
        raise ConfigurationError("--batch and --batch-shape both define the batch; give one of them.")
    for flag in ("generate", "rows", "prompt"):
        if (count := getattr(asked, flag)) is not None and count < 1:
            raise ConfigurationError(f"--{flag} {count}: give 1 or more.")
    if asked.generate is None and (asked.rows, asked.prompt) != (None, None):
        raise ConfigurationError("--rows and --prompt describe a generation; give --generate with them.")
    if asked.module is None and asked.kwargs:
        raise ConfigurationError(
            "--kwargs are the arguments of --module; give --module pkg.mod:Name, or model.key=value."
        )
    if asked.module is not None and asked.batch is None and not asked.batch_shape:
        raise ConfigurationError(
            f"--module {asked.module} needs a batch to plan for; give --batch pkg.mod:function, or --batch-shape as in "
            "input_ids=8x512:int64 labels=8x512:int64."
        )


def help_text() -> str:
    """Return the help; call it inside `searching`."""
    flags = [f"  {f'{flag} {value}':<32}{words}" for flag, (value, words) in FLAGS.items()]
    return _HEAD.format(groups=groups_in_words(), flags="\n".join(flags))
