"""The watch over file descriptor 2 finds Metal's messages, and passes everything on."""

import os
import subprocess
import sys

import pytest

from lightning_unified.step.faults.standard_error import StandardError, fault_in
from tests.support import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no Metal")

MODULE = ROOT / "lightning_unified" / "step" / "faults" / "standard_error.py"
MESSAGE = (
    b"Error: command buffer exited with error status.\n\tThe Metal Performance Shaders operations encoded on it may not have completed.\n"
    b"\tError: \n\t(null)\n\tImpacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)\n"
)
PROGRAM = """
import os, runpy, subprocess, sys
watch = runpy.run_path({path!r})["StandardError"]()  # without the package, whose import takes seconds
os.write(2, b"one\\n")
subprocess.run(["sh", "-c", "echo two >&2"])
print("three", file=sys.stderr)
if {aborts}:
    os.abort()
watch.close()
os.write(2, b"four\\n")
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MESSAGE, "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"),
        (
            b"Execution of the command buffer was aborted due to an error during execution. Internal Error (0000000e:Internal Error)",
            "Internal Error (0000000e:Internal Error)",
        ),
        (b"command buffer exited with error status", "command buffer exited with error status"),
        (b"UserWarning: the command buffer of the robot is full (00000001)", None),
    ],
)
def test_messages_are_told_from_other_text(text, said):
    found = fault_in(text)
    assert found == said if said is None else found is not None and found.endswith(said)


def test_a_message_is_known_as_soon_as_it_is_written_once_and_in_pieces(capfd):
    watch = StandardError()
    try:
        os.write(2, MESSAGE[:20])
        half = watch.news()
        os.write(2, MESSAGE[20:])
        found = watch.news(), watch.news()
    finally:
        watch.close()
    assert (half, found[1]) == (None, None)
    assert found[0] is not None
    assert capfd.readouterr().err.encode() == MESSAGE


def test_the_descriptor_is_as_before_even_if_another_capture_came_between(capfd):
    before, other = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        StandardError().close()
        assert os.path.sameopenfile(2, before)
        watch = StandardError()
        os.dup2(other, 2)
        watch.close()
        assert os.path.sameopenfile(2, other)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(other)
        capfd.readouterr()


@pytest.mark.parametrize("aborts", [False, True])
def test_all_text_arrives_even_the_last_words_of_a_process_that_aborts(aborts):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(aborts=aborts, path=str(MODULE))],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    lines = sorted(run.stderr.decode().split())
    assert lines == sorted(["one", "two", "three"] + ([] if aborts else ["four"]))
