"""Caches of the run's device are cleared between batches, by its counters.

On a CPU nothing is read.
"""

import pytest
import torch

from lightning_unified.hardware import Figure, Reading
from lightning_unified.step.recovery.cache_care import CacheCare, shapes_of

GIB = 2**30
DEVICE = torch.device("cuda", 0)


class Device:
    """A pool whose figures are set by hand, and a clock that goes on by the second."""

    def __init__(self, *, device=DEVICE, live=None):
        self.now, self.reads, self.released = 0.0, 0, 0
        self.reserved, self.allocated, self.peak = 8.0, 1.0, 4.0
        self.care = CacheCare(
            clock=lambda: self.now, read=self.read, live=lambda _: live and int(live * GIB), release=self.release
        )
        self.care.begin(device)

    def read(self, device):
        self.reads += 1
        figures = {
            name: Figure(value if value is None else int(value * GIB), name)
            for name, value in (("reserved", self.reserved), ("allocated", self.allocated), ("peak", self.peak))
        }
        unknown = Figure(None, "unknown")
        return Reading(
            device="cuda:0", backend="cuda", name="", pool="dedicated", total=unknown, available=unknown, **figures
        )

    def release(self, device):
        assert device == DEVICE
        self.released += 1
        self.now += 0.01
        self.reserved = max(self.allocated, 1.0)

    def batch(self, *, rows=4, seconds=2.0):
        self.care.batch_began({"x": torch.zeros(rows, 3)})
        self.care.sample()
        self.now += seconds
        return self.care.batch_done(10 * GIB)


def test_much_that_is_held_for_nothing_is_cleared_and_said_once():
    device = Device()
    said = device.batch()
    device.batch()
    device.reserved = 8.0
    device.now += 1000
    again = device.batch()

    assert said == ["caches cleared: 4.00 GiB were held beside the tensors"]
    assert (device.released, device.care.clears, again) == (2, 2, [])


def test_activations_that_the_next_batch_takes_again_are_no_waste():
    device = Device()
    device.reserved = 6.0  # 1 live now, 4 at the peak

    assert device.batch() == []
    assert device.released == 0


def test_pressure_makes_it_thriftier():
    device = Device()
    device.reserved, device.care.pressed = 5.0, True

    assert device.batch() == ["caches cleared: 1.00 GiB were held beside the tensors, while memory is short"]


def test_quick_batches_are_looked_at_once_a_second():
    device = Device()
    device.reserved = 4.0
    for _ in range(40):
        device.batch(seconds=0.125)

    assert device.reads == 5


def test_without_a_peak_counter_what_was_live_before_a_backward_stands_for_it():
    device = Device(live=7.5)
    device.peak = None
    device.reserved = 2.0
    device.batch()  # the first look shows that no peak is counted
    device.reserved = 8.0
    device.batch()

    assert device.released == 0


def test_varying_shapes_are_advised_against_once():
    device = Device()
    said = []
    for rows in range(1, 9):
        device.reserved = 4.0 + 0.3 * rows
        said += device.batch(rows=rows)

    assert len(said) == 1
    assert "Pad batches" in said[0]


def test_on_a_cpu_nothing_is_looked_at():
    device = Device(device=torch.device("cpu"))

    assert device.batch() == []
    assert device.reads == 0


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.zeros(2, 3), ((2, 3),)),
        ({"a": torch.zeros(2), "b": ["text", "more"], "c": (torch.zeros(1, 4),)}, ((2,), (1, 4))),
        (["only", "text"], ()),
        ([torch.zeros(1)] * 100, ((1,),) * 64),
    ],
)
def test_the_shapes_of_a_batch_are_those_of_its_tensors(batch, shapes):
    assert shapes_of(batch) == shapes
