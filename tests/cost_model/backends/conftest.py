"""Helpers that measure the memory of fake steps and of real CPU kernels."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_MARK = 1_000_003


class Operations(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).removeprefix("aten.").rpartition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


@pytest.fixture
def operations():
    return Operations


@pytest.fixture
def kept():
    """Run, and return bytes that the backward pass keeps, inputs and parameters left out."""

    def count(run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> int:
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            held.append(tensor)
            return tensor

        held = []
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        return sum(size for storage, size in storages.items() if storage not in given)

    return count


@pytest.fixture
def taken():
    """Run calls on the real CPU; return each result and its temporary bytes.

    Temporary bytes exceed the bytes that the call leaves allocated.
    """

    def measure(calls: Sequence[tuple[Callable, tuple]]) -> list[SimpleNamespace]:
        results = []
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for func, args in calls:
                torch.empty(_MARK, dtype=torch.uint8)
                results.append(func(*args))
            torch.empty(_MARK, dtype=torch.uint8)
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        return [SimpleNamespace(result=r, hidden=h) for r, h in zip(results, _hidden(sizes), strict=True)]

    return measure


def _hidden(sizes):
    marks = [index for index, size in enumerate(sizes) if size == -_MARK]
    for start, end in pairwise(marks):
        live = peak = 0
        for size in sizes[start + 1 : end - 1]:
            live += size
            peak = max(peak, live)
        yield peak - live
