"""Watch file descriptor 2 for Metal's messages on command buffers, and pass everything on."""

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

__all__ = ["StandardError", "fault_in"]

# MPSCommandBuffer prints the first ("Error: command buffer exited with error status.", pytorch issues 123171, 125954); Metal prints
# the second; the third is the name of the cause in both ("Impacting Interactivity (0000000e:kIOGPU…)", mlx issue 3267).
_FAULT = re.compile(
    rb"command buffer exited with error status"
    rb"|Execution of the command buffer was aborted due to an error during execution"
    rb"|kIOGPUCommandBufferCallbackError\w+"
)
_CAUSE = re.compile(rb"[^\s(][^\n(]*\([0-9a-f]{8}:[^)\n]+\)")
_LONGEST = 200  # bytes of a message that may arrive in two reads
_DRAINED_S = 2.0

# The forwarder: copies a file as it grows, until its standard input has something to read or is closed. It is a process of its
# own, so that the last words of a process that aborts are shown, and that no writer ever waits for this one.
_FORWARD = """
import os, select, sys
log, out, place = int(sys.argv[1]), int(sys.argv[2]), 0
ended = False
while not ended:
    ended = bool(select.select([0], [], [], 0.02)[0])
    while data := os.pread(log, 65536, place):
        place += os.write(out, data)
"""


def fault_in(text: bytes) -> str | None:
    """Return Metal's message on an aborted command buffer as one line; None without one."""
    found = _FAULT.search(text)
    if found is None:
        return None
    cause = _CAUSE.search(text)
    return (found if cause is None else cause).group().decode(errors="replace")


class StandardError:
    """The messages of libraries on file descriptor 2, read at once and passed on unchanged.

    Until `close`, the descriptor is a file without a name. A small process copies the file to where the descriptor pointed, within
    some hundredths of a second. A write to a file never blocks and is there for a reader at once, which a pipe cannot offer. Python's
    own standard error goes past the file, so that progress bars and prompts find their terminal; a stream that replaced it
    (pytest's capture, a notebook's) is left alone.

    Programs that the run starts inherit the file. Their output after `close` is lost.

    Raises:
        OSError: If standard error is closed, or the file or the process cannot be made.
    """

    def __init__(self) -> None:
        import fcntl  # Windows has none, and no Metal

        self._place = 0
        self._rest = b""
        self._before = os.dup(2)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed in `close`
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
        self._forwarder = self._forward()
        _retarget_python(2, self._before)
        os.dup2(self._file.fileno(), 2)

    def news(self) -> str | None:
        """Return Metal's message on an aborted command buffer since the last call; None without one."""
        text = self._rest + b"".join(self._unread())
        said = fault_in(text)
        self._rest = b"" if said is not None else text[-_LONGEST:]
        if self._forwarder.poll() is not None:
            self.close()  # somebody ended the forwarder; nothing would be passed on
        return said

    def close(self) -> None:
        """Restore the descriptor unless it was replaced since, and pass the rest on."""
        if self._file.closed:
            return
        if os.path.sameopenfile(2, self._file.fileno()):
            os.dup2(self._before, 2)
        _retarget_python(self._before, 2)
        if self._forwarder.poll() is None:
            try:
                self._forwarder.communicate(b"\n", timeout=_DRAINED_S)
            except subprocess.TimeoutExpired:  # the reader of standard error has stopped reading
                self._forwarder.kill()
                self._forwarder.wait()
        self._file.close()
        os.close(self._before)

    def _unread(self) -> Iterator[bytes]:
        while not self._file.closed and (data := os.pread(self._file.fileno(), 1 << 16, self._place)):
            self._place += len(data)
            yield data

    def _forward(self) -> "subprocess.Popen[bytes]":
        ends = self._file.fileno(), self._before
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _FORWARD, *map(str, ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,  # Ctrl-C is for the run
        )


def _retarget_python(old: int, new: int) -> None:
    """Let Python's first standard error write to `new`, if it writes to the descriptor `old`."""
    stream: Any = sys.__stderr__
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if type(raw) is io.FileIO and not raw.closed and raw.fileno() == old:
        stream.flush()
        raw.__init__(new, "wb", closefd=False)  # the same object: handlers of `logging` and progress bars hold it
