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
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.utils.tensorboard",
        "lightning.pytorch",
        "lightning_unified.strategies",
        "lightning_unified.cli.train",
    ]
)


class Program:
    """A file, or a module by its name, that runs as `__main__` in a process of its own."""

    def __init__(
        self,
        program: Path | str,
        *arguments: object,
        given: str = "",
        cwd: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._command = [os.fspath(program), *map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "stdin").write_text(given)
        self._process = CONTEXT.Process(
            target=_become,
            args=(isinstance(program, Path), self._command, self._folder.name, cwd or Path.cwd(), dict(environment)),
        )
        self._process.start()

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send the signal `number` to the process."""
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess:
        """Return the exit code and output of the program when it ends.

        Raises:
            subprocess.TimeoutExpired: If it still runs after `timeout` seconds; it is killed.
        """
        with self._folder as folder:
            self._process.join(timeout)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
                raise subprocess.TimeoutExpired(self._command, timeout)
            out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self._command, self._process.exitcode, out, err)


def run_program(
    program: Path | str, *arguments: object, timeout: float = 120, **options
) -> subprocess.CompletedProcess:
    """Run a `Program` to its end; the arguments are those of `Program` and of its `wait`."""
    return Program(program, *arguments, **options).wait(timeout)


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
