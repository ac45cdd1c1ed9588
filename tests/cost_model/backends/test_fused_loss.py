"""In a dry run, the chunked loss has fused operations on CUDA and torch's elsewhere."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_unified.cost_model.backends.target import mimic
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy


class Operations(TorchDispatchMode):
    """Notes the names of operations, and the bytes of the largest float32 result."""

    def __init__(self):
        super().__init__()
        self.names, self.widest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.widest = max(self.widest, result.numel())
        return result


def step(backend):
    with FakeTensorMode(), mimic(backend):
        hidden = torch.randn(256, 8, requires_grad=True)
        weight = torch.randn(1000, 8, requires_grad=True)
        labels = torch.zeros(256, dtype=torch.int64)
        with Operations() as seen, torch.autocast("cuda" if backend == "cuda" else "cpu", torch.bfloat16):
            linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=64).backward()
    return seen


def test_a_step_on_cuda_makes_no_float32_logits():
    seen = step("cuda")

    assert {f"lightning_unified.{name}.default" for name in ("losses_of_rows", "gradient_of_rows", "add_product")} <= (
        seen.names
    )
    assert seen.widest < 64 * 1000


@pytest.mark.parametrize("backend", ["cpu", "rocm", "mps"])
def test_a_step_elsewhere_uses_torchs_operators(backend):
    assert not any(name.startswith("lightning_unified") for name in step(backend).names)


def test_products_of_both_ways_count_the_same_operations():
    counted = []
    for backend in ("cuda", "cpu"):
        with FlopCounterMode(display=False) as flops:
            step(backend)
        counted.append(flops.get_total_flops())

    assert counted[0] == counted[1] > 0
