"""Output that cannot be written never raises; messages after a bar begin on a new line."""

import errno
import io
import os
import subprocess
import sys

import pytest

from lightning_unified.cli.main import main
from lightning_unified.terminal import labelled, lasting_output, say


class Failing(io.StringIO):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def streams(monkeypatch):
    """Return a function that replaces both standard streams by one."""

    def replace(stream):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replace


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_kept_and_not_raised(streams, number):
    stream = streams(Failing(number))
    with lasting_output() as output:
        print("gone")
        print("gone", file=sys.stderr)

    assert output.failure.errno == number
    assert sys.stdout is sys.stderr is stream


def test_a_closed_stream_and_a_missing_one_are_written_to_without_an_error(streams):
    for stream in (io.StringIO(), None):
        if stream is not None:
            stream.close()
        streams(stream)
        with lasting_output():
            print("gone", flush=True)
            sys.stdout.write("gone")


def test_characters_that_the_encoding_lacks_are_escaped(streams):
    bytes_ = io.BytesIO()
    streams(io.TextIOWrapper(bytes_, encoding="ascii"))
    with lasting_output():
        print("12 → 24 GiB")

    assert bytes_.getvalue() == b"12 \\u2192 24 GiB\n"


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (["\rEpoch 0:  5%", "error: no\n"], "\rEpoch 0:  5%\nerror: no\n"),
        (["\rEpoch 0:  5%", "\rEpoch 0: 10%", "\n", "done\n"], "\rEpoch 0:  5%\rEpoch 0: 10%\ndone\n"),
        (["\rEpoch", "\x1b[31merror\x1b[0m\n"], "\rEpoch\n\x1b[31merror\x1b[0m\n"),
        (["\rEpoch", "\r     \r", "said\n"], "\rEpoch\r     \rsaid\n"),
        (["half a ", "line\n"], "half a line\n"),
    ],
)
def test_a_message_after_a_bar_begins_on_a_line_of_its_own(monkeypatch, tmp_path, written, seen):
    with (tmp_path / "out").open("w+", newline="") as both:
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        with lasting_output():
            for at, text in enumerate(written):
                (sys.stderr if at == len(written) - 1 else sys.stdout).write(text)
        both.seek(0)

        assert both.read() == seen


def test_streams_of_different_files_do_not_break_each_others_lines(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with lasting_output():
        sys.stdout.write("\rEpoch 0")
        sys.stderr.write("error\n")

    assert (out.getvalue(), err.getvalue()) == ("\rEpoch 0", "error\n")


def test_lines_of_a_labelled_process_begin_with_its_name(streams):
    stream = streams(io.StringIO())
    with labelled("model.width=8"):
        say("one\ntwo")
    say("three")

    assert stream.getvalue() == "[model.width=8] one\n[model.width=8] two\nthree\n"


def test_no_command_shows_the_commands_and_trains_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("doctor", "plan", "train", "watch", "report"))
    assert max(map(len, out.splitlines())) <= 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_result_that_cannot_be_written_is_an_error_and_a_closed_pipe_is_none():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lightning_unified"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output could not be written: No space left on device; free some space.\n",
    )
    end, other = os.pipe()
    os.close(end)
    closed = subprocess.run(command, stdout=other, stderr=subprocess.PIPE, text=True, check=False)
    os.close(other)

    assert (closed.returncode, closed.stderr) == (0, "")
