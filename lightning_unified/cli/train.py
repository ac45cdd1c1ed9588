"""`train`: check the command line, then let Hydra run it once or as a sweep."""

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import hydra
from hydra._internal.utils import get_args_parser  # the one description of Hydra's own flags
from omegaconf import DictConfig

from lightning_unified.cli.config.composition import CONFIG_NAME, PACKAGED, searching
from lightning_unified.cli.config.help import help_text
from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.cli.config.overrides import check_overrides, key_of, parse_overrides, quoted, with_quoted_paths
from lightning_unified.cli.config.resume import AUTO, SavedRun, find_run, find_sweep, merged_overrides
from lightning_unified.cli.config.sweeper import register as register_sweeper
from lightning_unified.cli.config.trust import FLAG
from lightning_unified.cli.ranks.board import Board
from lightning_unified.errors import ConfigurationError
from lightning_unified.terminal import lasting_output

if TYPE_CHECKING:
    from lightning_unified.cli.run.job import Outcome

__all__ = ["train"]


def train(arguments: Sequence[str], *, config_path: str = PACKAGED, program: str = "train.py") -> int:
    """Train as the command line requests, and return the exit code.

    Args:
        arguments: Overrides, Hydra's flags, and `--trust`, as given on the command line.
        config_path: The configuration: a folder or `pkg://package.name`.
        program: The arguments to Python that start this command, for the help and the resume command.
    """
    with lasting_output():
        return _train(arguments, config_path=config_path, program=f"{_interpreter()} {program}")


def _train(arguments: Sequence[str], *, config_path: str, program: str) -> int:
    board = Board()
    try:
        accept_lazy_help()
        register_sweeper()
        trusted = FLAG in arguments
        arguments = [argument for argument in arguments if argument != FLAG]
        flags, unknown = get_args_parser().parse_known_args(with_quoted_paths(arguments))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]}: there is no such flag{did_you_mean(unknown[0], ['--multirun', '--help', '--cfg', '--info', '--config-dir', FLAG])} "
                "Overrides are written key=value, without dashes."
            )
        if flags.info or flags.shell_completion or flags.hydra_help:
            return _hydra(arguments, config_path, lambda _: None)
        if flags.config_dir and not Path(flags.config_dir).is_dir():
            raise ConfigurationError(f"--config-dir {flags.config_dir}: there is no such directory.")
        extra = [f"hydra.searchpath=[file://{Path(flags.config_dir).absolute()}]"] if flags.config_dir else []
        with searching(config_path):
            if flags.help:
                sys.stdout.write(help_text(program, [*extra, *flags.overrides], multirun=flags.multirun))
                return 0
            if flags.multirun and board.launch.is_external:
                raise ConfigurationError(
                    f"-m under {board.launch.by}: it started {board.launch.size} processes of one run; start a sweep without it, and let each "
                    "run start its ranks by trainer.devices."
                )
            goes_on, flags.overrides = _going_on(flags.overrides, multirun=flags.multirun, trusted=trusted)
            saved = None if goes_on else _run_to_resume(flags.overrides, trusted=trusted)
            overrides = _with_run(flags.overrides, saved)
            check_overrides([*extra, *overrides], multirun=flags.multirun)
        if flags.cfg:
            return _hydra(arguments, config_path, lambda _: None)
        return _run(
            overrides,
            job=partial(
                _job,
                given=flags.overrides,
                saved=saved,
                program=program,
                flags=(["--config-dir", flags.config_dir] if flags.config_dir else []) + [FLAG] * trusted,
                goes_on=goes_on,
                board=board,
            ),
            multirun=flags.multirun,
            config_path=config_path,
            config_dir=flags.config_dir,
            # A continued run writes its overrides itself once it has started, so a refused one leaves the saved run unchanged. The first
            # of several ranks makes the run's directory.
            quiet=([] if saved is None and not goes_on and board.launch.is_first else ["hydra.output_subdir=null"])
            + ([] if board.launch.is_first else ["hydra.run.dir=."]),
        )
    except (Exception, KeyboardInterrupt) as error:
        return board.report(error)


def accept_lazy_help(container: Any = argparse._ActionsContainer) -> None:
    """Let argparse of Python 3.14 accept help objects that are not strings.

    It formats each help text when an option is added. Hydra 1.3 gives an object that becomes text when help is shown, and argparse
    refuses it as "badly formed help string". A release of Hydra that gives text makes this function superfluous.
    """
    check = getattr(container, "_check_help", None)  # Python 3.14 and later
    if check is None or getattr(check, "accepts_lazy_help", False):
        return

    def check_text(parser: Any, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    check_text.accepts_lazy_help = True  # type: ignore[attr-defined]
    container._check_help = check_text


def _interpreter() -> str:
    """Return the command that starts this Python.

    It is `python`, or its path where the environment is not activated.
    """
    if shutil.which("python") == sys.executable:
        return "python"
    relative = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if relative.startswith("..") else relative)


def _going_on(overrides: Sequence[str], *, multirun: bool, trusted: bool) -> tuple[bool, list[str]]:
    """Return whether `run_dir` is continued where it holds something, and the overrides of that run or sweep.

    Raises:
        ConfigurationError: If nothing says which directory is to be continued.
    """
    parsed = parse_overrides(overrides)
    given = {key_of(override): override.value() for override in parsed if key_of(override) in ("resume", "run_dir")}
    resume = given.get("resume")
    if resume is None or (not multirun and resume != AUTO):
        return False, list(overrides)
    if resume == AUTO and "run_dir" not in given:
        raise ConfigurationError(
            "resume=auto continues what run_dir holds; give run_dir, without the time in its name."
        )
    rest = [text for text, one in zip(overrides, parsed, strict=True) if key_of(one) != "resume"]
    if resume == AUTO:
        return True, rest
    return True, [*merged_overrides(find_sweep(str(resume), trusted=trusted), rest), f"run_dir={quoted(str(resume))}"]


def _run_to_resume(overrides: Sequence[str], *, trusted: bool) -> SavedRun | None:
    """Return the saved run that `resume=` names, or None."""
    for override in parse_overrides(overrides):
        if key_of(override) == "resume" and override.value() is not None:
            return find_run(str(override.value()), trusted=trusted)
    return None


def _with_run(overrides: Sequence[str], saved: SavedRun | None) -> list[str]:
    """Merge `overrides` into those of the saved run.

    Keep its directory unless `run_dir` is given.
    """
    if saved is None:
        return list(overrides)
    own = [
        text
        for text, override in zip(overrides, parse_overrides(overrides), strict=True)
        if key_of(override) == "run_dir"
    ]
    return [
        *merged_overrides(saved.overrides, overrides),
        f"resume={quoted(saved.directory)}",
        *(own or [f"run_dir={quoted(saved.directory)}"]),
    ]


def _job(config: DictConfig, **about: Any) -> "Outcome":
    from lightning_unified.cli.run.job import Job

    return Job(config=config, **about).run()


def _run(
    overrides: list[str],
    *,
    job: "Callable[[DictConfig], Outcome]",
    multirun: bool,
    config_path: str,
    config_dir: str | None,
    quiet: Sequence[str],
) -> int:
    codes = [0]

    def task(config: DictConfig) -> float:
        outcome = job(config)
        codes.append(outcome.exit_code)
        if outcome.stops_sweep:
            raise SystemExit(outcome.exit_code)
        return outcome.objective

    flags = (["--multirun"] if multirun else []) + (["--config-dir", config_dir] if config_dir else [])
    flags += quiet
    folder = _sweep_folder(overrides)
    named = [
        f"hydra.sweep.dir={quoted(folder)}",
        f"hydra.job.config.override_dirname.exclude_keys=[{','.join(_fixed_keys(overrides))}]",
    ]
    code = _hydra([*flags, *overrides, *(named if multirun else [])], config_path, task)
    return code or max(codes) or int(multirun and not _all_finished(folder))


def _sweep_folder(overrides: Sequence[str]) -> Path:
    """Return the folder of a sweep's runs: `run_dir`, or a new folder named after the time."""
    for override in parse_overrides(overrides):
        if key_of(override) in {"run_dir", "hydra.sweep.dir"}:
            return Path(str(override.value()))
    return Path("runs", "sweep", time.strftime("%Y-%m-%d_%H-%M-%S"))


def _fixed_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that a sweep does not vary; the names of its runs' folders omit them."""
    return [key_of(override) for override in parse_overrides(overrides) if not override.is_sweep_override()]


def _all_finished(folder: Path) -> bool:
    """Return whether every run of a sweep wrote its summary.

    Runs in other processes report in no other way.
    """
    return all((path.parent / "summary.json").is_file() for path in folder.rglob(".hydra"))


def _hydra(arguments: list[str], config_path: str, task: Callable[[DictConfig], Any]) -> int:
    """Run `task` as a Hydra application on `arguments`, and return the exit code.

    Raises:
        ConfigurationError: If Hydra cannot compose the configuration or create its folder.
    """
    application = hydra.main(version_base="1.3", config_path=config_path, config_name=CONFIG_NAME)(task)
    with patch.object(sys, "argv", [sys.argv[0], *arguments]), patch.dict(os.environ, HYDRA_FULL_ERROR="1"):
        try:
            application()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except OSError as error:  # Hydra's own: the task reports its errors itself
            raise ConfigurationError(
                f"run_dir: {error.filename} cannot be written ({error.strerror}); give a run_dir that can."
            ) from error
    return 0
