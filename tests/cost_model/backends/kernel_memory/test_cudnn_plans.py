# ruff: noqa: N802 - names of cuDNN's C functions
"""Workspaces that cuDNN states itself."""

from ctypes import c_void_p
from itertools import count

import pytest
import torch

from benchmarks.cost_model.record_convolutions import taken
from lightning_unified.cost_model.backends import hidden_bytes
from lightning_unified.cost_model.backends.kernel_memory import cudnn_plans
from lightning_unified.cost_model.backends.kernel_memory.cudnn_plans import Operand, asked_workspace

aten = torch.ops.aten
OPERANDS = (
    Operand((2, 8, 4, 4), (128, 16, 4, 1)),
    Operand((8, 8, 1, 1), (8, 1, 1, 1)),
    Operand((2, 8, 4, 4), (128, 16, 4, 1)),
)
FAILS = 3000


class Listed:
    """cuDNN's C functions over lists of kernels.

    A kernel is its numerical notes and the bytes of its workspace, None if it cannot run.
    """

    def __init__(self, instant, fallback=()):
        self.lists = {0: instant, 2: fallback}
        self.made, self.numbers, self.alive = {}, count(1), 0

    def cudnnGetErrorString(self, status):
        return b"not supported"

    def cudnnBackendCreateDescriptor(self, kind, place):
        number = place._obj.value = next(self.numbers)
        self.made[number] = {"kind": kind.value}
        self.alive += 1
        return 0

    def cudnnBackendDestroyDescriptor(self, address):
        self.alive -= 1
        return 0

    def cudnnBackendSetAttribute(self, address, name, kind, entries, array):
        self.made[address.value][name.value] = list(array)
        return 0

    def cudnnBackendFinalize(self, address):
        one = self.made[address.value]
        if one["kind"] == cudnn_plans._HEURISTIC:
            return 0 if self.lists[one[200][0]] else FAILS
        return FAILS if one["kind"] == cudnn_plans._PLAN and self._kernel(one)[1] is None else 0

    def _kernel(self, plan):
        return self.made[plan[401][0]]["kernel"]

    def cudnnBackendGetAttribute(self, address, name, kind, most, found, array):
        one, name = self.made[address.value], name.value
        if name == 202:
            kernels = self.lists[one[200][0]]
            found._obj.value = len(kernels)
            for place, kernel in zip(array or (), kernels, strict=False):
                self.made[place]["kernel"] = kernel
        elif name == 300:
            self.made[array[0]]["kernel"] = one["kernel"]
        elif name == 1303:
            notes = one["kernel"][0]
            found._obj.value = len(notes)
            array[: len(notes)] = notes
        elif name == 402:
            array._obj.value = self._kernel(one)[1]
        return 0


@pytest.fixture
def asked(monkeypatch):
    def ask(cudnn, dtype=torch.bfloat16):
        cudnn_plans._workspace.cache_clear()
        monkeypatch.setattr(cudnn_plans, "_library", lambda: cudnn)
        monkeypatch.setattr(cudnn_plans, "_handle", lambda device: c_void_p(1))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.backends.cudnn, "enabled", True, raising=False)
        return asked_workspace("forward", OPERANDS, dtype, padding=(0, 0), stride=(1, 1), dilation=(1, 1))

    yield ask
    cudnn_plans._workspace.cache_clear()


def test_the_first_kernel_that_can_run_counts(asked):
    assert asked(Listed([([], None), ([], 512), ([], 64)])) == 512


def test_fallbacks_follow_where_no_listed_kernel_runs(asked):
    assert asked(Listed([([], None)], [([], 7)])) == 7
    assert asked(Listed([], [([], 7)])) == 7


def test_kernels_that_torch_leaves_out_are_left_out(asked, monkeypatch):
    kernels = [([1], 1), ([0, 4], 2), ([4], 3), ([], 4)]
    assert asked(Listed(kernels)) == 2
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert asked(Listed(kernels)) == 4
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert asked(Listed(kernels), torch.float32) == 3


def test_without_a_kernel_or_with_benchmark_on_nothing_is_stated(asked, monkeypatch):
    assert asked(Listed([])) is None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert asked(Listed([([], 1)])) is None


def test_every_descriptor_is_destroyed(asked):
    cudnn = Listed([([], None), ([], 512)])
    asked(cudnn)
    assert cudnn.alive == 0


SHAPES = {
    "square": ((8, 64, 32, 32), (128, 64, 3, 3), {}),
    "many channels": ((16, 512, 64, 64), (128, 512, 1, 1), {}),
    "dilated": ((8, 64, 64, 64), (64, 64, 3, 3), {"padding": [6, 6], "dilation": [6, 6]}),
    "grouped": ((8, 64, 32, 32), (64, 16, 3, 3), {"groups": 4, "padding": [1, 1]}),
    "films": ((2, 32, 8, 28, 28), (32, 32, 3, 3, 3), {"padding": [1] * 3, "stride": [1] * 3, "dilation": [1] * 3}),
    "lines": ((8, 64, 4096), (64, 64, 3), {"padding": [2], "stride": [1], "dilation": [2]}),
    "transposed": ((8, 128, 32, 32), (128, 64, 2, 2), {"stride": [2, 2], "transposed": True}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_gpu_takes_the_stated_bytes(name, dtype):
    shape, kernel, options = SHAPES[name]
    options = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "groups": 1, **options}
    source, weight = (torch.randn(each, device="cuda", dtype=dtype) for each in (shape, kernel))
    settings = (
        *[options[each] for each in ("stride", "padding", "dilation", "transposed")],
        [0] * len(options["stride"]),
    )
    settings = (*settings, options["groups"])
    gradient = torch.randn_like(aten.convolution(source, weight, None, *settings))
    masks = {"forward": None, "input": [True, False, False], "weight": [False, True, False]}
    true, stated = {}, {}
    for each, mask in masks.items():
        call, args = aten.convolution, (source, weight, None, *settings)
        if mask is not None:
            call, args = aten.convolution_backward, (gradient, source, weight, None, *settings, mask)
        true[each] = taken(lambda call=call, args=args: call(*args))
        order = hidden_bytes(call.default, args, {}, call(*args), backend="cuda").order
        stated[each] = max((step for step in order if step > 0), default=0)
    assert stated == pytest.approx(true, rel=0.01, abs=2048)
