"""Standard streams whose failed writes never raise.

Messages never continue the line of a progress bar.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

__all__ = ["LastingOutput", "LastingStream", "lasting_output"]

_STYLE = re.compile(r"(?:\x1b\[[\d;]*m)*")
_CLEAR_BELOW = "\x1b[J"  # the lines of further bars


class LastingOutput:
    """Standard output and error, replaced for the duration of `lasting_output`.

    Attributes:
        failure: The first error of a write; None while all writes succeed.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None


class _Cursor:
    """Record whether the cursor is behind a line that began with a carriage return.

    Progress bars write such lines.
    """

    def __init__(self) -> None:
        self._behind_bar = False

    def placed(self, text: str, *, terminal: bool) -> str:
        """Return `text`, after a line break if it would continue a progress bar; note where it ends."""
        styles = _STYLE.match(text)
        begins = text[styles.end() if styles else 0 :][:1]
        if self._behind_bar and begins not in ("", "\r", "\n", "\x1b"):
            text = "\n" + (_CLEAR_BELOW if terminal else "") + text
        _, ended, last = text.rpartition("\n")
        if "\r" in last:
            self._behind_bar = bool(last.rpartition("\r")[2].strip())
        elif ended:
            self._behind_bar = False
        return text


class LastingStream:
    """A text stream that drops texts which it cannot write, e.g. to a closed pipe.

    Characters that the encoding lacks are written as escapes. All other attributes are those of the wrapped stream.
    """

    def __init__(self, stream: TextIO, output: LastingOutput, cursor: _Cursor) -> None:
        self._stream, self._output, self._cursor = stream, output, cursor
        self._is_terminal = _ask(stream.isatty) is True and os.environ.get("TERM") != "dumb" and os.name != "nt"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`; return its length, also where the stream is gone."""
        placed = self._cursor.placed(text, terminal=self._is_terminal)
        try:
            try:
                self._stream.write(placed)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(placed.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._let_go(error)
        except ValueError:  # the stream is closed
            pass
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream if it is still there."""
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)
        except ValueError:
            pass

    def _let_go(self, error: OSError) -> None:
        """Redirect this and all later output to the null device.

        This includes the buffered rest, child processes and native code.
        """
        self._output.failure = self._output.failure or error
        number = _ask(self._stream.fileno)
        if isinstance(number, int):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[LastingOutput]:
    """Replace `sys.stdout` and `sys.stderr` by `LastingStream`; do nothing if already replaced.

    A stream that the process was started without goes to nowhere.
    """
    output = LastingOutput()
    if isinstance(sys.stdout, LastingStream):
        yield output
        return
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        plain = [stream or opened.enter_context(Path(os.devnull).open("w")) for stream in before]
        cursors = [_Cursor(), _Cursor()]
        if _same_file(*plain):
            cursors[1] = cursors[0]
        own = [LastingStream(stream, output, cursor) for stream, cursor in zip(plain, cursors, strict=True)]
        sys.stdout, sys.stderr = own  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield output
        finally:
            for stream in own:
                stream.flush()
            for name, mine, stream in zip(("stdout", "stderr"), own, before, strict=True):
                if getattr(sys, name) is mine:
                    setattr(sys, name, stream)


def _same_file(first: TextIO, second: TextIO) -> bool:
    numbers = _ask(first.fileno), _ask(second.fileno)
    try:
        files = [os.fstat(number) for number in numbers if isinstance(number, int)]
    except OSError:
        return False
    return len(files) == 2 and os.path.samestat(*files)


def _ask(method: Any) -> Any:
    """Return the result of a stream's method; None if the stream does not have it.

    Streams of tests and notebooks may lack methods.
    """
    try:
        return method()
    except (OSError, ValueError, AttributeError):
        return None
