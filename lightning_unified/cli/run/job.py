"""One run, from its configuration to its exit code: compose, check, build, fit, save."""

import contextlib
import math
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.config.binding import check_binding, targets
from lightning_unified.cli.config.composition import composed
from lightning_unified.cli.config.overrides import key_of, parse_overrides
from lightning_unified.cli.config.resume import (
    LAST,
    OVERRIDES,
    Change,
    SavedRun,
    check_steps_left,
    continued,
    joined,
    merged_overrides,
    relocated,
)
from lightning_unified.cli.config.trust import FLAG, is_own
from lightning_unified.cli.failure import INTERRUPTED, TERMINATED, report_interrupt
from lightning_unified.cli.ranks.board import Board
from lightning_unified.cli.ranks.command import rank_command, resume_override, short
from lightning_unified.cli.ranks.group import own_ranks, released
from lightning_unified.cli.ranks.lost import end_soon, with_advice
from lightning_unified.errors import ConfigurationError, LightningUnifiedError, RankError
from lightning_unified.terminal import activity, labelled, lasting_output, say

if TYPE_CHECKING:
    from lightning import LightningModule

    from lightning_unified.cli.run.parts import Parts
    from lightning_unified.hardware import Sources

__all__ = ["Job", "Outcome"]


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
        flags: The flags beside the overrides that a further rank needs.
        goes_on: Whether the run continues what its directory holds, and is left out if that is done.
        board: What the ranks of this run share.
    """

    config: DictConfig
    given: Sequence[str] = ()
    saved: SavedRun | None = None
    program: str = "python train.py"
    flags: Sequence[str] = ()
    goes_on: bool = False
    board: Board = field(default_factory=Board)

    def run(self) -> Outcome:
        """Train, save the results and return the outcome; print every error instead of raising it."""
        with lasting_output(), _own_lines(), released(self.board.launch):
            try:
                directory = self._directory()
            except Exception as error:
                return Outcome(exit_code=self.board.report(error), stops_sweep=True)
            return self._reported(directory, set(directory.rglob("*")))

    def _directory(self) -> Path:
        """Return the run's directory, the same on all ranks: only the first one names it after the time."""
        launch = self.board.launch
        own = HydraConfig.get().runtime.output_dir if launch.is_first else self.config.run_dir
        return Path(self.board.shared("run_dir", str(own))).absolute()

    def _reported(self, directory: Path, there: set[Path]) -> Outcome:
        try:
            with contextlib.ExitStack() as until_start:  # an activity's last line precedes the error
                if self.goes_on:
                    return self._gone_on(directory, until_start)
                return self._run(directory, until_start)
        except (KeyboardInterrupt, SystemExit) as error:
            if not _is_interrupt(error):
                raise
            kept = f"{short(directory / LAST)} is kept; go on with: {self._resume_command(directory)}"
            if self.board.launch.is_first:
                report_interrupt(kept if (directory / LAST).exists() else "")
            return Outcome(exit_code=INTERRUPTED, stops_sweep=True)
        except RankError as error:
            end_soon()
            return Outcome(exit_code=self.board.report(_with_advice(self, error, directory)), stops_sweep=True)
        except Exception as error:
            code = self.board.report(error)
            is_alone = self.board.launch.is_first and HydraConfig.get().mode == RunMode.RUN
            if code == ConfigurationError.exit_code and is_alone:
                _remove_traces(directory, there=there)
            return Outcome(exit_code=code)

    def _gone_on(self, directory: Path, until_start: contextlib.ExitStack) -> Outcome:
        """Continue what the directory holds; leave it as it is if it is done, and begin where it holds nothing."""
        overrides = list(HydraConfig.get().overrides.task)
        found = continued(directory, overrides, trusted=FLAG in self.flags)
        if isinstance(found, float):
            if self.board.launch.is_first:
                say(f"{short(directory)} is done; it is left as it is.")
            self.board.leave()
            return Outcome(exit_code=0, objective=found)
        if found is None and self.board.launch.is_first:  # a sweep in other processes finds its runs by this file
            (directory / OVERRIDES).parent.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(overrides, directory / OVERRIDES)
        given = merged_overrides([], overrides)
        return replace(self, saved=found, given=given)._run(directory, until_start)

    def _run(self, directory: Path, until_start: contextlib.ExitStack) -> Outcome:
        first = self.board.launch.is_first
        if first and (directory / LAST).exists() and (self.saved is None or directory != self.saved.directory):
            raise ConfigurationError(
                f"run_dir={short(directory)} holds the checkpoints of another run; {resume_override(directory)} goes on with it, "
                "another run_dir leaves it as it is."
            )
        until_start.enter_context(activity("loading libraries"))
        config, changes, sources = self._configuration(directory)
        # Import slowly loading modules only after the checks that need none of them.
        from lightning_unified.cli.ranks.strategy import with_strategy
        from lightning_unified.cli.run.data_fit import check_batches, check_interpolations
        from lightning_unified.cli.run.machine import check_settings, prepare

        choices = dict(HydraConfig.get().runtime.choices)
        check_interpolations(config, choices)
        check_settings(config)
        machine = prepare(config, sources)
        if self.saved is not None:
            check_steps_left(self.saved, config.trainer.max_steps)
        bound = with_strategy(config)
        check_binding(bound)
        from lightning_unified.cli.run import parts as building
        from lightning_unified.cli.run.result import finish, reason_of_stop
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
            if not first:
                return
            OmegaConf.save(config, directory / "config.yaml", resolve=True)
            (directory / OVERRIDES).parent.mkdir(exist_ok=True)
            OmegaConf.save(HydraConfig.get().overrides.task, directory / OVERRIDES)
            if self.saved is not None:
                show_changes(self.saved.directory, changes)
            show_start(config, machine, module=module, given=self.given)
            show_data(parts.data, parts.callbacks.values(), batches=batches_of(parts.trainer))

        parts = building.build(bound, resume_command=resume_command, on_start=begin)
        check_batches(parts.data, parts.module, choices)
        overrides = list(HydraConfig.get().overrides.task)
        with own_ranks(parts.trainer, rank_command(self.program, self.flags, overrides, self.saved, directory)):
            try:
                self._fit(parts)
            except SystemExit as stop:
                interrupt = building.callback_of(parts, "GracefulInterrupt")
                if not _is_interrupt(stop) or not getattr(interrupt, "is_forced", False):
                    raise
                return Outcome(exit_code=INTERRUPTED, stops_sweep=True)  # the callback has said what is kept
            objective = finish(
                parts, config=config, directory=directory, resume_command=resume_command, stopped=reason_of_stop(parts)
            )
        return _outcome(building.callback_of(parts, "GracefulInterrupt"), objective)

    def _resume_command(self, directory: Path) -> str:
        return f"{self.board.launch.command(self.program)} {resume_override(directory)}"

    def _configuration(self, directory: Path) -> tuple[DictConfig, list[Change], "Sources"]:
        """Return the final configuration, the changes of a resumed run, and the opened machine.

        `hardware=auto` becomes the hardware that was found.
        """
        from lightning_unified.cli.ranks.strategy import with_devices
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
        given = {key_of(override) for override in parse_overrides(list(self.given))}
        return with_devices(config, self.board.launch, given), changes, sources

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


def _with_advice(job: Job, error: RankError, directory: Path) -> RankError:
    """Return `error` with the newest checkpoint and the command that goes on without the lost ranks."""
    return with_advice(
        error,
        launch=job.board.launch,
        checkpoint=Path(short(directory / LAST)),
        program=job.program,
        resume=resume_override(directory),
        config=job.config,
    )


def _outcome(interrupt: Any, objective: float) -> Outcome:
    """Return the outcome of a run whose results are written.

    Args:
        interrupt: The run's `GracefulInterrupt`, if it has one.
        objective: The value for a sweeper.
    """
    stopped_by = getattr(interrupt, "signal", None)
    terminated = stopped_by not in (None, signal.SIGINT) and not interrupt.is_requeued
    return Outcome(exit_code=TERMINATED if terminated else 0, objective=objective, stops_sweep=stopped_by is not None)


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
