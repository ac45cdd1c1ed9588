"""Buffers of sums over rows, compared with sizes recorded on an H200 under torch 2.11."""

import pytest
import torch

from lightning_unified.cost_model.backends import with_workspaces
from lightning_unified.cost_model.backends.reductions import sum_bytes, with_sums
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.planner.fake.recorder import Recorder

MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "columns", "recorded"),
    [
        (400_000, 128, 132 * MIB),
        (40_000, 128, 40_960_000),
        (40_000, 16, 80_896),
        (12_288, 128, 12 * MIB),
        (12_288, 512, 48 * MIB),
        (12_288, 384, 36 * MIB),
    ],
)
def test_the_buffer_is_what_a_gpu_took(rows, columns, recorded):
    assert sum_bytes(rows, columns) == recorded


@pytest.mark.parametrize(("rows", "columns"), [(1000, 128), (100_000, 1 << 20), (1, 1)])
def test_few_rows_and_very_many_columns_need_none(rows, columns):
    assert sum_bytes(rows, columns) == 0


def summed(run, *, backend="cuda"):
    recorder = Recorder(backend=backend)
    with recorder:
        recorder.begin()
        held = run()
    trace = Trace(events=recorder.stop(), rows=1, backend=backend)
    del held
    return [event.bytes for event in with_sums(trace).events if isinstance(event, Take)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_rows_takes_its_result_and_then_its_buffer(dtype):
    entries = torch.empty(8, 512, 64, dtype=dtype)
    assert summed(lambda: entries.sum((0, 1)))[-2:] == [64 * dtype.itemsize, sum_bytes(8 * 512, 64)]


def test_a_sum_of_halves_in_float32_has_the_buffer_of_a_sum_in_float32():
    entries = torch.empty(4096, 64, dtype=torch.bfloat16)
    assert summed(lambda: entries.sum(0, dtype=torch.float32))[-1] == sum_bytes(4096, 64)


def test_a_sum_along_rows_has_no_buffer():
    entries = torch.empty(64, 4096)
    assert summed(lambda: entries.sum(1))[-1] == 64 * 4


def test_a_buffer_is_given_back_before_anything_else_happens():
    work = Work("aten.sum.dim_IntList", "backward", flops=4096 * 64, moved=4 * (4096 * 64 + 64), dtype="float32")
    later = Work("aten.mm.default", "backward")
    given = Trace(events=(work, Take(3, 256, "gradients"), later), rows=1, backend="cuda")
    buffer = Take(4, sum_bytes(4096, 64), "temporaries")
    assert with_sums(given).events == (work, Take(3, 256, "gradients"), buffer, Give(4), later)
    assert buffer in with_workspaces(given, environment={}, generation=9).events


def test_a_cpu_has_no_buffers():
    entries = torch.empty(4096, 64)
    assert summed(lambda: entries.sum(0), backend="cpu")[-1] == 64 * 4
