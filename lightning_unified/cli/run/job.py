"""One run, from its configuration to its exit code: compose, check, build, fit, save."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.config.binding import check_binding, targets
from lightning_unified.cli.config.composition import composed
from lightning_unified.cli.config.resume import (
    LAST,
    OVERRIDES,
    Change,
    SavedRun,
    check_steps_left,
    joined,
    merged_overrides,
    relocated,
)
from lightning_unified.cli.config.trust import FLAG, is_own
from lightning_unified.cli.failure import INTERRUPTED, TERMINATED, report_failure, report_interrupt
from lightning_unified.errors import ConfigurationError, LightningUnifiedError
from lightning_unified.terminal import activity, labelled, lasting_output

if TYPE_CHECKING:
    from lightning import LightningModule

    from lightning_unified.cli.run.parts import Parts
    from lightning_unified.hardware import Sources

__all__ = ["Job", "Outcome"]

_PLAIN = re.compile(r"[\w./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    Args:
        exit_code: The exit code of the process.
        objective: The best value of the metric that decides `best.ckpt`, for a sweeper; NaN if there is none.
        stops_sweep: Whether the remaining runs of a sweep are cancelled.
    """

    exit_code: int
    objective: float = math.nan
    stops_sweep: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run as Hydra starts it.

    Args:
        config: The configuration that Hydra composed.
        given: The overrides of the command line.
        saved: The run to continue, if any.
        program: The command that the user typed, for the resume command.
    """

    config: DictConfig
    given: Sequence[str] = ()
    saved: SavedRun | None = None
    program: str = "python train.py"

    def run(self) -> Outcome:
        """Train, save the results and return the outcome; print every error instead of raising it."""
        directory = Path(HydraConfig.get().runtime.output_dir)
        there = set(directory.rglob("*"))
        with lasting_output(), _own_lines():
            return self._reported(directory, there)

    def _reported(self, directory: Path, there: set[Path]) -> Outcome:
        try:
            with contextlib.ExitStack() as until_start:  # an activity's last line precedes the error
                return self._run(directory, until_start)
        except (KeyboardInterrupt, SystemExit) as error:
            if not _is_interrupt(error):
                raise
            kept = f"{_short(directory / LAST)} is kept; go on with: {self._resume_command(directory)}"
            report_interrupt(kept if (directory / LAST).exists() else "")
            return Outcome(exit_code=INTERRUPTED, stops_sweep=True)
        except Exception as error:
            code = report_failure(error)
            if code == ConfigurationError.exit_code and HydraConfig.get().mode == RunMode.RUN:
                _remove_traces(directory, there=there)
            return Outcome(exit_code=code)

    def _run(self, directory: Path, until_start: contextlib.ExitStack) -> Outcome:
        if (directory / LAST).exists() and (self.saved is None or directory != self.saved.directory):
            raise ConfigurationError(
                f"run_dir={_short(directory)} holds the checkpoints of another run; {_resume_override(directory)} goes on with it, "
                "another run_dir leaves it as it is."
            )
        until_start.enter_context(activity("loading libraries"))
        config, changes, sources = self._configuration(directory)
        # Import slowly loading modules only after the checks that need none of them.
        from lightning_unified.cli.run.data_fit import check_batches, check_interpolations
        from lightning_unified.cli.run.machine import check_settings, prepare

        choices = dict(HydraConfig.get().runtime.choices)
        check_interpolations(config, choices)
        check_settings(config)
        machine = prepare(config, sources)
        if self.saved is not None:
            check_steps_left(self.saved, config.trainer.max_steps)
        check_binding(config)
        from lightning_unified.cli.run import parts as building
        from lightning_unified.cli.run.result import finish
        from lightning_unified.cli.run.screen import (
            batches_of,
            quiet_third_parties,
            show_changes,
            show_data,
            show_start,
        )

        quiet_third_parties()  # Lightning sets its own levels when it is imported
        own = all(is_own(node["_target_"]) for _, node in targets(OmegaConf.to_container(config, resolve=True)))
        resume_command = self._resume_command(directory) + ("" if own else f" {FLAG}")
        until_start.close()
        until_start.enter_context(activity("preparing data and model"))

        def begin(module: "LightningModule") -> None:
            until_start.close()
            OmegaConf.save(config, directory / "config.yaml", resolve=True)
            (directory / OVERRIDES).parent.mkdir(exist_ok=True)
            OmegaConf.save(HydraConfig.get().overrides.task, directory / OVERRIDES)
            if self.saved is not None:
                show_changes(self.saved.directory, changes)
            show_start(config, machine, module=module, given=self.given)
            show_data(parts.data, parts.callbacks.values(), batches=batches_of(parts.trainer))

        parts = building.build(config, resume_command=resume_command, on_start=begin)
        check_batches(parts.data, parts.module, choices)
        try:
            self._fit(parts)
        except SystemExit as stop:
            if not _is_interrupt(stop) or not getattr(
                building.callback_of(parts, "GracefulInterrupt"), "is_forced", False
            ):
                raise
            return Outcome(exit_code=INTERRUPTED, stops_sweep=True)  # the callback has said what is kept
        stopped_by = getattr(building.callback_of(parts, "GracefulInterrupt"), "signal", None)
        relieved = getattr(building.callback_of(parts, "PressureGuard"), "stopped_for", None) is not None
        objective = finish(
            parts,
            config=config,
            directory=directory,
            resume_command=resume_command,
            stopped=relieved or stopped_by is not None,
        )
        code = TERMINATED if stopped_by == signal.SIGTERM else 0
        return Outcome(exit_code=code, objective=objective, stops_sweep=stopped_by is not None)

    def _resume_command(self, directory: Path) -> str:
        return f"{self.program} {_resume_override(directory)}"

    def _configuration(self, directory: Path) -> tuple[DictConfig, list[Change], "Sources"]:
        """Return the final configuration, the changes of a resumed run, and the opened machine.

        `hardware=auto` becomes the hardware that was found.
        """
        from lightning_unified.cli.run.machine import open_machine
        from lightning_unified.cli.run.screen import show_note
        from lightning_unified.hardware import describe, detect

        choices = dict(HydraConfig.get().runtime.choices)
        config, changes = self.config, []
        if self.saved is not None:
            resumed, changes = joined(self.saved, self.given)
            config = relocated(resumed.config, directory)
        sources = open_machine(config)
        if self.saved is None and choices.get("hardware") == "auto":
            found = detect(sources)
            config = composed(merged_overrides(list(HydraConfig.get().overrides.task), [f"hardware={found}"])).config
            show_note(f"hardware=auto found hardware={found}: {describe(sources)}")
        own = OmegaConf.select(config, "platform.batch_size")
        if own is not None and own == config.data.batch_size and choices.get("memory") != "auto":
            show_note(
                f"effective batch {own}: model={choices.get('model')}'s own on hardware={config.hardware.name}, before memory={choices.get('memory')}'s"
            )
        with open_dict(config):
            if OmegaConf.is_interpolation(config, "name"):
                config["name"] = choices.get("model")
            config["run_dir"] = str(directory)
            config["resume"] = None if self.saved is None else str(self.saved.directory)
        return config, changes, sources

    def _fit(self, parts: "Parts") -> None:
        """Train; convert errors before the first batch into configuration errors."""
        from lightning_unified.cli.run.data_fit import lacking

        checkpoint = None if self.saved is None else str(self.saved.checkpoint)
        weights_only = None if self.saved is None else not self.saved.trusted
        try:
            parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint, weights_only=weights_only)
        except LightningUnifiedError:
            raise
        except KeyError as error:
            named = lacking(error, parts.throughput.fields, dict(HydraConfig.get().runtime.choices))
            if named is not None and parts.trainer.global_step == parts.throughput.first_step:
                raise named from error
            raise
        except (ValueError, FileNotFoundError) as error:
            if not parts.throughput.started:
                raise ConfigurationError(str(error)) from error
            raise


def _is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C was the cause; Lightning turns it into `SystemExit`."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)


def _own_lines() -> contextlib.AbstractContextManager[None]:
    """Return a context that puts the run's name before each line, if several runs are parallel."""
    hydra = HydraConfig.get()
    alone = hydra.mode == RunMode.RUN or str(hydra.launcher.get("_target_")).endswith("BasicLauncher")
    return contextlib.nullcontext() if alone else labelled(hydra.job.override_dirname or str(hydra.job.id))


def _remove_traces(directory: Path, *, there: set[Path]) -> None:
    """Remove a refused run's files, except those that were `there` before.

    Folders that are empty then are removed too.

    Checkpoints are never removed.
    """
    new = sorted(set(directory.rglob("*")) - there, reverse=True)
    if any(path.suffix == ".ckpt" for path in new):
        return
    for path in new:
        path.rmdir() if path.is_dir() else path.unlink()
    if not (directory / "config.yaml").exists():
        shutil.rmtree(directory / ".hydra", ignore_errors=True)
    here = Path.cwd()
    with contextlib.suppress(OSError):  # a folder that holds other files stays
        for folder in (directory, *(parent for parent in directory.parents if here in parent.parents)):
            folder.rmdir()


def _resume_override(directory: Path) -> str:
    """Return `resume=…` as typed in a shell.

    Hydra needs quotes around a sweep's folders, which contain `=`.
    """
    path = _short(directory)
    return f"resume={path}" if _PLAIN.fullmatch(path) else shlex.quote(f'resume="{path}"')


def _short(path: Path) -> str:
    """Return `path` relative to the working directory if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
