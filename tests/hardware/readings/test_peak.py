"""The peak is cheap to read, and resets if the machine allows it."""

import dataclasses
import mmap

from lightning_unified.hardware import Sources, read, read_peak, reset_peak


def test_the_cheap_peak_is_the_readings():
    before = read_peak("cpu")
    peak = read("cpu").peak

    assert before.source == peak.source
    assert 0 < before.bytes <= peak.bytes


def test_a_peak_set_back_forgets_what_was_freed():
    with mmap.mmap(-1, 64 * 2**20) as block:  # given back when closed; the C library may keep what a tensor gives it
        block.write(b"1" * len(block))
        high = read_peak("cpu").bytes

    assert reset_peak("cpu")
    assert read_peak("cpu").bytes < high - 32 * 2**20


def test_a_counter_that_cannot_be_set_back_says_so(tmp_path):
    assert not reset_peak("cpu", sources=dataclasses.replace(Sources.live(), proc=tmp_path))
