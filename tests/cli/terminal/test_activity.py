"""Work that takes longer than a moment is shown with its time, and shorter work is not."""

import _thread
import io
import subprocess
import sys
import time

import pytest

from lightning_unified.terminal import activities, activity, labelled, lasting_output


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Return a function that runs an activity and gives what it wrote."""
    monkeypatch.setattr(activities, "_AFTER_S", 0.02)
    monkeypatch.setattr(activities, "_LIVE_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")

    def run(stream, *, seconds=0.15, name="planning the step"):
        monkeypatch.setattr(sys, "stderr", stream)
        with activity(name):
            time.sleep(seconds)
        return stream.getvalue()

    return run


def test_a_file_gets_two_lines(shown):
    first, last = shown(io.StringIO()).splitlines()

    assert first.startswith("planning the step … ") and first.endswith(" s")
    assert last.startswith("planning the step: ") and last.endswith("s")


def test_a_terminal_gets_one_line_that_is_overwritten(shown):
    text = shown(Terminal())

    assert text.count("\n") == 2 and text.startswith("\nplanning the step … ")
    assert text.count("\r") >= 3 and text.endswith("s\n")


def test_an_activity_after_a_bar_begins_on_a_new_line(shown, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w+", newline="") as both:
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        with lasting_output():
            sys.stdout.write("\rEpoch 0:   0%")
            with activity("planning the step"):
                time.sleep(0.1)
            sys.stdout.write("\rEpoch 0:   5%")
        both.seek(0)
        lines = both.read().split("\n")

    assert lines[0] == "\rEpoch 0:   0%" and lines[-1] == "\rEpoch 0:   5%"
    assert lines[1].startswith("planning the step … ")


def test_inner_activities_and_those_of_other_processes_are_not_shown(shown, monkeypatch):
    with activity("the outer one"):
        assert "inner" not in shown(io.StringIO(), name="the inner one")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert shown(io.StringIO()) == ""


def test_a_short_activity_is_not_shown(shown, monkeypatch):
    monkeypatch.setattr(activities, "_AFTER_S", 60.0)

    assert shown(io.StringIO(), seconds=0) == ""


def test_an_activity_of_one_of_several_runs_bears_its_name(shown):
    with labelled("seed=3"):
        text = shown(Terminal())

    assert "\r" not in text
    assert all(line.startswith("[seed=3] planning the step") for line in text.splitlines())


def test_an_error_ends_the_activity(shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(ValueError, match="no"), activity("planning the step"):
        raise ValueError("no")

    assert shown(io.StringIO()) != ""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_work_goes_on_where_memory_is_too_short_for_a_thread():
    program = """
import resource
from pathlib import Path
from lightning_unified.terminal import activity
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
with activity("planning the step"):
    print("planned")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout) == (0, "planned\n"), done.stderr


def test_a_thread_that_never_runs_holds_up_no_work(shown, monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)

    assert shown(io.StringIO()) == ""
