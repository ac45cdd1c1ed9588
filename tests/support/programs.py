"""Run Python programs as processes of their own, forked with torch already imported.

A server process imports torch and Lightning once, which saves several seconds a program. A test of imports, or of environment
variables that imports read, needs a fresh interpreter.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "lightning_unified.strategies"])


def run_program(
    program: Path | str,
    *arguments: object,
    given: str = "",
    cwd: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout: float = 120,
) -> subprocess.CompletedProcess:
    """Run a file, or a module by its name, as `__main__`; return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: If it still runs after `timeout` seconds; it is killed.
    """
    command = [os.fspath(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(given)
        process = CONTEXT.Process(
            target=_become, args=(isinstance(program, Path), command, folder, cwd or Path.cwd(), dict(environment))
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _become(is_file: bool, command: list[str], folder: str, cwd: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # the server's objects: the collection after each shortage need not walk over them
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  it stays open
    sys.argv = command
    if is_file:
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
