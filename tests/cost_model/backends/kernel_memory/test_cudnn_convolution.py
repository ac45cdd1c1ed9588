"""cuDNN's convolution workspaces, compared with an H200 (torch 2.11, cuDNN 9.19).

`benchmarks/cost_model/record_convolutions.py` made the recordings.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_unified.cost_model.backends import hidden_bytes
from lightning_unified.cost_model.backends.kernel_memory.calls import BACK, RESULT

aten = torch.ops.aten
MIB = 2**20
MEASURED = Path(__file__).parent / "cudnn_convolutions.json"
COLUMNS = ("rows", "channels", "out", "side", "kernel", "stride", "dtype", "forward", "input", "weight")
SHAPES: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in json.loads(MEASURED.read_text())]


def orders(
    *, rows, channels, out, side, kernel, stride, dtype="bfloat16", last=False, bias=False, transposed=False, **_
):
    """What the forward pass takes, and the backward pass."""
    dtype, padding = getattr(torch, dtype), kernel // 2 if kernel % 2 else 0
    source = torch.empty(rows, channels, side, side, dtype=dtype, device="meta")
    kernels = (channels, out) if transposed else (out, channels)
    weight = torch.empty(*kernels, kernel, kernel, dtype=dtype, device="meta")
    if last:
        source, weight = source.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)
    settings = ([stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1)
    output = aten.convolution(source, weight, None, *settings)
    sizes = [out] if bias else None
    gradients = (torch.empty_like(output), source, weight, sizes, *settings, [True, True, bias])
    results = [source, weight, *[output] * bias]
    forward = hidden_bytes(aten.convolution.default, (source, weight, None, *settings), {}, output, backend="cuda")
    backward = hidden_bytes(aten.convolution_backward.default, gradients, {}, results, backend="cuda")
    return forward.order, backward.order


def taken(shape) -> dict[str, int]:
    """The bytes of the three passes."""
    forward, backward = orders(**shape)
    found = [step for step in (*(forward or (RESULT, 0)), *(backward or (0, 0))) if step >= 0]
    forward, source, weight = found
    return {"forward": forward, "input": source, "weight": weight}


@pytest.mark.parametrize("name", ["forward", "input", "weight"])
def test_half_of_the_passes_are_within_five_percent_and_few_are_far_off(name):
    large = [shape for shape in SHAPES if shape[name] >= MIB]
    errors = sorted(abs(taken(shape)[name] / shape[name] - 1) for shape in large)
    assert errors[len(errors) // 2] < 0.05
    assert errors[int(0.7 * len(errors))] < {"forward": 0.01, "input": 0.01, "weight": 0.25}[name]


def test_large_passes_are_within_a_tenth():
    large = [(shape, name) for shape in SHAPES for name in ("forward", "input", "weight") if shape[name] >= 64 * MIB]
    errors = sorted(abs(taken(shape)[name] / shape[name] - 1) for shape, name in large)
    assert errors[int(0.9 * len(errors))] < 0.1


def test_the_two_gradients_are_one_after_the_other_each_with_its_workspace():
    _, backward = orders(rows=2, channels=16, out=32, side=8, kernel=3, stride=1, dtype="float32", bias=True)
    copies = 2 * 16 * 64 * 4 + 32 * 16 * 9 * 4 + 2 * 32 * 64 * 4 + 144
    assert backward == (RESULT, copies, BACK, RESULT, copies, BACK, RESULT)


def test_a_product_copies_nothing_and_channels_fill_sixteen_bytes():
    forward, _ = orders(rows=4, channels=64, out=64, side=16, kernel=1, stride=1)
    assert forward == ()
    forward, _ = orders(rows=2, channels=20, out=32, side=8, kernel=3, stride=1)
    assert forward == (RESULT, 2 * 24 * 64 * 2 + 32 * 24 * 9 * 2 + 2 * 32 * 64 * 2 + 144)


def test_a_convolution_in_channels_last_is_not_copied():
    forward, backward = orders(rows=2, channels=16, out=32, side=8, kernel=3, stride=1, last=True)
    assert (forward, backward) == ((), ())


def test_a_transposed_convolution_takes_what_its_mirror_does():
    mirror: dict[str, Any] = {"rows": 8, "kernel": 2, "stride": 2}
    _, backward = orders(channels=32, out=64, side=32, **mirror)
    forward, _ = orders(channels=64, out=32, side=16, transposed=True, **mirror)
    assert forward[1] == backward[1]


def test_without_tf32_float32_is_left_as_it_lies(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert orders(rows=2, channels=16, out=32, side=8, kernel=3, stride=1, dtype="float32") == ((), ())


def test_the_gradient_of_an_enlarged_image_is_copied_where_it_is_a_part_of_another():
    gradient = torch.empty(2, 6, 8, 8, device="meta")[:, :4]
    args = (gradient, [8, 8], [2, 4, 4, 4])
    result = torch.empty(2, 4, 4, 4, device="meta")
    found = hidden_bytes(aten.upsample_nearest2d_backward.default, args, {}, result, backend="cuda")
    assert found.order == (2 * 4 * 64 * 4,)
