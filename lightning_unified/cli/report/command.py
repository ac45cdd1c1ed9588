"""`report`: write run directories as one HTML page, or as JSON."""

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lightning_unified.cli.failure import report_failure
from lightning_unified.cli.report.html.page import page
from lightning_unified.cli.report.run_directory.find import find_runs, names_of
from lightning_unified.cli.report.run_directory.read import read_run
from lightning_unified.cli.run.json_files import plain
from lightning_unified.errors import ConfigurationError

__all__ = ["main"]

_NAME = "report.html"


def main(argv: Sequence[str]) -> int:
    """Write the page, or print the runs as JSON; return 0, or 2 for an invalid request."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as done:
        return int(done.code or 0)
    try:
        directories = find_runs(arguments.runs)
        runs = [read_run(path, name=name) for path, name in zip(directories, names_of(directories), strict=True)]
        if arguments.json:
            print(json.dumps({"runs": [plain(run.as_json()) for run in runs]}, indent=2))
        if arguments.output is not None or not arguments.json:
            output = arguments.output or _beside(directories, given=arguments.runs)
            _write(output, page(runs))
            said = f"{output} ({output.stat().st_size / 1000:,.0f} kB): {len(runs)} run{'s' if len(runs) > 1 else ''}"
            print(said, file=sys.stderr if arguments.json else sys.stdout)
            if arguments.open:
                webbrowser.open(output.absolute().as_uri())
    except ConfigurationError as error:
        return report_failure(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_unified report", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", metavar="DIR", help="run directories; the folder of a sweep means all its runs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page's file (default: {_NAME} in DIR; with several DIR in the folder that holds them)",
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON; write a page only with --output")
    return parser


def _beside(directories: Sequence[Path], *, given: Sequence[str]) -> Path:
    """Return the page's file: in the one folder given, else in the folder that holds all runs.

    If only the root of the file system holds them all, it is the first run's parent.
    """
    if len(given) == 1:
        return Path(given[0]).expanduser() / _NAME
    try:
        common = Path(os.path.commonpath(directories))
    except ValueError:  # on different drives
        common = Path(directories[0].anchor)
    if common == Path(common.anchor):
        common = directories[0].parent
    return (common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common) / _NAME


def _write(path: Path, text: str) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--output {path}: it is an HTML page; name a file that ends in .html.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} cannot be written: {error.strerror or error}; name a file in a folder that is there and yours."
        ) from error
