"""Find run directories from paths: a run, the runs of a sweep, or the nearest runs."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_unified.cli.run.journal import JOURNAL
from lightning_unified.errors import ConfigurationError

__all__ = ["MOST_RUNS", "find_runs", "names_of"]

MOST_RUNS = 24
"""The largest number of runs that one page can distinguish."""

_MARKS = ("summary.json", "metrics.csv", "plan.json", JOURNAL)
_DEPTH = 4  # runs/sweep/<time>/<overrides>


def find_runs(given: Sequence[str]) -> list[Path]:
    """Return the run directories of `given`, each once, in that order.

    A folder of runs means all its runs.

    Raises:
        ConfigurationError: If a path is no run directory and contains none, or if there are more than `MOST_RUNS`.
    """
    if not given:
        raise ConfigurationError(f"report needs a run directory; {_near(Path('runs'))}")
    found: list[Path] = []
    for text in given:
        path = Path(text).expanduser().absolute()
        runs = _runs_in(path)
        if not runs:
            raise ConfigurationError(_refusal(text, path))
        found += [run for run in runs if run not in found]
    if len(found) > MOST_RUNS:
        newest = [_short(run) for run in sorted(found, key=_modified, reverse=True)[:2]]
        raise ConfigurationError(
            f"{' '.join(given)}: these are {len(found)} runs, and a page shows at most {MOST_RUNS}; name fewer, such as {' '.join(newest)}."
        )
    return found


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return a unique name for each run: its folder, with as many parent folders as needed."""
    names = []
    for run in runs:
        parts = run.parts
        depth = 1
        while depth < len(parts) - 1 and any(other.parts[-depth:] == parts[-depth:] for other in runs if other != run):
            depth += 1
        names.append(str(Path(*parts[-depth:])) if parts[-1] else str(run))
    return names


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS) or (path / ".hydra" / "overrides.yaml").is_file()


def _runs_in(path: Path, *, depth: int = _DEPTH) -> list[Path]:
    if not path.is_dir():
        return []
    if _is_run(path):
        return [path]
    below = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")) if depth else []
    return [run for each in below for run in _runs_in(each, depth=depth - 1)]


def _refusal(text: str, path: Path) -> str:
    if path.is_file() and _is_run(path.parent):
        return f"{text}: that is a file of a run; give its directory, {_short(path.parent)}."
    what = "there is no such directory" if not path.exists() else "that is a file"
    if path.is_dir():
        what = f"neither a run directory (it has none of {', '.join(_MARKS)}) nor a folder of some"
    return f"{text}: {what}; {_near(path)}"


def _near(path: Path) -> str:
    """Suggest runs of the nearest folder that has any.

    The suggestions have the most similar names, or else are the newest runs.
    """
    places = ((path.parent, 1), (Path.cwd() / "runs", _DEPTH), (path.parent.parent, 2))
    for folder, depth in places:
        runs = {_short(run): run for run in _runs_in(folder, depth=depth)}
        if runs:
            likest = difflib.get_close_matches(_short(path), runs, n=3, cutoff=0.5)
            newest = sorted(runs, key=lambda name: _modified(runs[name]), reverse=True)[:3]
            return f"the nearest {'run is' if len(runs) == 1 else 'runs are'} {', '.join(likest or newest)}."
    return "give the directory that a run printed as its own, such as runs/gearhead/2026-01-31_12-00-00."


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _modified(path: Path) -> float:
    return max((mark.stat().st_mtime for mark in path.glob("*.*") if mark.is_file()), default=0.0)
