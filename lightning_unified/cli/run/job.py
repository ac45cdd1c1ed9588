"""One run, from its configuration to its exit code."""

import math
import os
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_unified.cli.failure import INTERRUPTED, TERMINATED, report_failure
from lightning_unified.cli.request.binding import check_binding
from lightning_unified.cli.request.composition import composed
from lightning_unified.cli.request.resume import Change, SavedRun, check_steps_left, joined, merged_overrides
from lightning_unified.cli.run.quiet import quiet_third_parties
from lightning_unified.errors import ConfigurationError, LightningUnifiedError

if TYPE_CHECKING:
    from lightning import LightningModule

    from lightning_unified.cli.run.parts import Parts

__all__ = ["Job", "Outcome", "Sweep"]

_PLAIN = re.compile(r"[\w./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended.

    Args:
        exit_code: What the process returns for it.
        objective: The validation loss, for a sweeper that minimises it; NaN if there is none.
        stops_sweep: Whether the runs after it are not wanted any more.
    """

    exit_code: int
    objective: float = math.nan
    stops_sweep: bool = False


@dataclass(kw_only=True, slots=True)
class Sweep:
    """The exit code of several runs: the highest."""

    exit_code: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count another run."""
        self.exit_code = max(self.exit_code, outcome.exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run as Hydra starts it.

    Args:
        config: As Hydra composed it.
        given: The overrides of the command line.
        saved: The run to continue, if any.
        program: How the user calls this.
    """

    config: DictConfig
    given: Sequence[str] = ()
    saved: SavedRun | None = None
    program: str = "python train.py"

    def run(self) -> Outcome:
        """Train, leave the record of it, and say how it ended; every error is printed, none is raised."""
        try:
            return self._run()
        except KeyboardInterrupt as error:
            report_failure(error)
            return Outcome(exit_code=INTERRUPTED, stops_sweep=True)
        except Exception as error:
            return Outcome(exit_code=report_failure(error))

    def _run(self) -> Outcome:
        directory = Path(HydraConfig.get().runtime.output_dir)
        config, changes = self._configuration(directory)
        # the slow imports come after the checks that need none of them
        from lightning_unified.cli.run.machine import check_numbers, prepare

        check_numbers(config)
        machine = prepare(config)
        if self.saved is not None:
            check_steps_left(self.saved, config.trainer.max_steps)
        check_binding(config)
        from lightning_unified.cli.run import parts as building
        from lightning_unified.cli.run.result import finish
        from lightning_unified.cli.run.screen import show_changes, show_start

        quiet_third_parties()  # Lightning sets its own levels when it is imported
        resume_command = f"{self.program} {_resume_override(directory)}"

        def begin(module: "LightningModule") -> None:
            OmegaConf.save(config, directory / "config.yaml", resolve=True)
            if self.saved is not None:
                show_changes(self.saved.directory, changes)
            show_start(config, machine, module=module)

        parts = building.build(config, resume_command=resume_command, on_start=begin)
        self._fit(parts, compile_module=bool(machine.settings.compile))
        stopped_by = getattr(building.callback_of(parts, "GracefulInterrupt"), "signal", None)
        validation_loss = finish(
            parts,
            config=config,
            machine=machine,
            directory=directory,
            resume_command=resume_command,
            stopped=stopped_by is not None,
        )
        code = TERMINATED if stopped_by == signal.SIGTERM else 0
        return Outcome(exit_code=code, objective=validation_loss, stops_sweep=stopped_by is not None)

    def _configuration(self, directory: Path) -> tuple[DictConfig, list[Change]]:
        """Return the configuration to run, nothing of it left for Hydra to find out, and what a resumed run changes in it."""
        from lightning_unified.cli.run.screen import show_note

        choices = dict(HydraConfig.get().runtime.choices)
        config, changes = self.config, []
        if self.saved is not None:
            resumed, changes = joined(self.saved, self.given)
            config = resumed.config
        elif choices.get("hardware") == "auto":
            from lightning_unified.hardware import describe, detect

            found = detect()
            config = composed(merged_overrides(list(HydraConfig.get().overrides.task), [f"hardware={found}"])).config
            show_note(f"hardware=auto found hardware={found}: {describe()}")
        with open_dict(config):
            if OmegaConf.is_interpolation(config, "name"):
                config["name"] = choices.get("model")
            config["run_dir"] = str(directory)
            config["resume"] = None if self.saved is None else str(self.saved.directory)
        return config, changes

    def _fit(self, parts: "Parts", *, compile_module: bool) -> None:
        from lightning_unified.cli.run.parts import compiled

        checkpoint = None if self.saved is None else str(self.saved.checkpoint)
        try:
            parts.trainer.fit(
                compiled(parts.module, wanted=compile_module),
                datamodule=parts.data,
                ckpt_path=checkpoint,
                weights_only=False,
            )
        except LightningUnifiedError:
            raise
        except (ValueError, FileNotFoundError) as error:
            if parts.trainer.global_step == 0:
                raise ConfigurationError(str(error)) from error
            raise


def _resume_override(directory: Path) -> str:
    """Return `resume=…` as it is typed in a shell; a sweep's folders hold `=`, which Hydra wants within quotes of its own."""
    path = _short(directory)
    return f"resume={path}" if _PLAIN.fullmatch(path) else shlex.quote(f'resume="{path}"')


def _short(path: Path) -> str:
    """Return `path` from the working directory where that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
