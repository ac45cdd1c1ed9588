"""Read a run directory in any state: finished, stopped, resumed, crashed or still running."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from omegaconf import OmegaConf

from lightning_unified.cli.config.bounded_files import read_json, read_text, read_yaml
from lightning_unified.cli.report.run_directory.moments import read_lines, tell
from lightning_unified.cli.report.run_directory.records import Moment, Run
from lightning_unified.cli.run.journal import JOURNAL
from lightning_unified.cli.run.metrics import Curve, read_curves
from lightning_unified.errors import ConfigurationError

__all__ = ["read_run"]


def read_run(directory: Path, *, name: str) -> Run:
    """Return the run in `directory`, called `name`.

    Files that cannot be read are listed as problems.
    """
    files = _Files(directory)
    summary, plan, config = files.json("summary.json"), files.json("plan.json"), files.yaml("config.yaml")
    journal = files.lines(JOURNAL)
    listed = plan.get("events")
    moments = tell(journal, pressure=files.lines("pressure.jsonl"), listed=listed if isinstance(listed, list) else ())
    machines, plans = _objects(journal, "machine"), _objects(journal, "plan")
    curves = files.curves()
    status, well = _status(moments, summary=summary, curves=curves, asked=_asked_steps(config))
    return Run(
        name=name,
        directory=directory,
        status=status,
        well=well,
        summary=summary,
        plan=plan or (plans[-1] if plans else {}),
        config=config,
        overrides=files.list(".hydra/overrides.yaml"),
        machine=machines[-1] if machines else {},
        curves=curves,
        moments=moments,
        samples=files.text("samples.txt").strip(),
        problems=tuple(files.problems),
    )


def _objects(lines: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    return [found for line in lines if isinstance(found := line.get(key), dict)]


class _Files:
    """Reader of one directory's files; an unreadable file becomes a problem, not an error."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.problems: list[str] = []

    def json(self, name: str) -> dict[str, Any]:
        content = self._try(name, read_json)
        return content if isinstance(content, dict) else {}

    def yaml(self, name: str) -> dict[str, Any]:
        content = self._try(name, lambda path: OmegaConf.to_container(read_yaml(path)))
        return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}

    def list(self, name: str) -> list[str]:
        content = self._try(name, lambda path: OmegaConf.to_container(read_yaml(path)))
        return [str(each) for each in content] if isinstance(content, list) else []

    def text(self, name: str) -> str:
        return self._try(name, read_text) or ""

    def lines(self, name: str) -> Sequence[Mapping[str, Any]]:
        return self._try(name, read_lines) or []

    def curves(self) -> dict[str, Curve]:
        """Return the curves of `metrics.csv`.

        Without that file, they come from Lightning's own logger in `version_*` folders.
        """
        own = self._directory / "metrics.csv"
        found = [own] if own.is_file() else sorted(self._directory.glob("**/version_*/metrics.csv"), key=_version)
        try:
            return read_curves(found)
        except OSError as error:
            self.problems.append(f"metrics.csv cannot be read: {error.strerror or error}")
            return {}

    def _try(self, name: str, call: Any) -> Any:
        path = self._directory / name
        if not path.is_file():
            return None
        try:
            return call(path)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0].removeprefix(f"{path}: ")
            kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
            self.problems.append(f"{name} cannot be read: {kind}{said}")
            return None


def _version(path: Path) -> tuple[int, str]:
    number = path.parent.name.rpartition("_")[2]
    return (int(number) if number.isdigit() else -1, str(path))


def _asked_steps(config: Mapping[str, Any]) -> int | None:
    trainer = config.get("trainer")
    steps = trainer.get("max_steps") if isinstance(trainer, dict) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def _status(
    moments: Sequence[Moment], *, summary: Mapping[str, Any], curves: Mapping[str, Curve], asked: int | None
) -> tuple[str, bool | None]:
    """Return the status of a run in words, and whether it ended well; its newest part decides."""
    course = [moment for moment in moments if moment.kind in ("began", "ended", "failed")]
    if course and course[-1].kind == "failed":
        return shorten(f"failed at step {_known(course[-1].step)}: {course[-1].text}", 200, placeholder=" …"), False
    seen = max((curve.steps[-1] for curve in curves.values() if curve.steps), default=None)
    if not summary or (course and course[-1].kind == "began"):
        last = "no step was logged" if seen is None else f"the last logged step is {seen}"
        return f"not finished: still running, or killed; {last}", None
    steps = summary.get("steps")
    if asked is not None and isinstance(steps, int) and steps < asked:
        return f"stopped after {steps:,} of {asked:,} steps", None
    return f"finished, {steps:,} steps" if isinstance(steps, int) else "finished", True


def _known(step: int | None) -> str:
    return "unknown" if step is None else f"{step:,}"
