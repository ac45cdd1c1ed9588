"""Memory that no dispatch mode sees counts: in-place gradient sums, and memory in kernels."""

import pytest
import torch

from lightning_unified.cost_model.backends import hidden_bytes
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.units import MIB

ENTRIES = MIB // 4
UP_TO_DATE = {"torch_version": "2.14"}  # its blocks are as large as their tensors


def numbers():
    return torch.zeros(ENTRIES)


@pytest.fixture
def mac():
    return SimulatedMachine("m2-16gb", **UP_TO_DATE)


def uses(times):
    """Return the peak of a backward pass in which a tensor of 1 MiB gets that many gradients."""
    mac = SimulatedMachine("m2-16gb", **UP_TO_DATE)
    with mac.active():
        x = numbers().requires_grad_()
        outputs = [x * 2 for _ in range(times)]
        torch.autograd.backward(outputs, [numbers()] * times)
    return mac.allocator.peak - times * MIB, mac.allocator.allocated


def test_a_sum_of_gradients_takes_the_memory_of_its_first_term():
    (two, _), (three, _) = uses(2), uses(3)

    assert two == three  # x, the outer gradient, the sum, and the next gradient
    assert two == 4 * MIB


def test_a_sum_whose_first_term_lives_on_has_memory_of_its_own(mac):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            kept.append(gradient * 2)
            return kept[-1]

    kept = []
    with mac.active():
        x = numbers().requires_grad_()
        outputs = [Keeps.apply(x), Keeps.apply(x)]
        torch.autograd.backward(outputs, [numbers()] * 2)
        before = mac.allocator.allocated
        numbers()  # the sum gets its block at the next operation, at the latest
        total = mac.allocator.allocated

    assert before in (total, total - MIB)
    assert torch.equal(x.grad, torch.zeros(ENTRIES)) and len(kept) == 2
    assert total >= 5 * MIB  # x, the outputs and both gradients that are kept


def test_memory_inside_metals_kernels_counts_until_the_call_ends():
    peaks = []
    for kernels in (None, hidden_bytes):
        mac = SimulatedMachine("m2-16gb", **UP_TO_DATE)
        with mac.active(kernels=kernels):
            scores = torch.zeros(512, 512)
            probabilities = torch.ops.aten._safe_softmax(scores, -1)
            after = mac.allocator.allocated
        peaks.append(mac.allocator.peak)
        assert after == scores.nbytes + probabilities.nbytes

    assert peaks[1] - peaks[0] == scores.numel()  # a boolean for each score


def test_a_loss_that_the_cpu_keeps_whole_counts_as_a_scalar_on_metal():
    mac = SimulatedMachine("m2-16gb", **UP_TO_DATE)
    with mac.active(kernels=hidden_bytes):
        loss = torch.nn.functional.mse_loss(numbers(), numbers())

        assert loss.untyped_storage().nbytes() == MIB
        assert mac.allocator.allocated == 256


def test_a_kernel_that_runs_out_of_memory_gives_its_blocks_back(mac):
    taken, given = [], []

    def take(size):
        if taken:
            raise RuntimeError("MPS backend out of memory")
        taken.append(size)
        return size

    call = hidden_bytes(torch.ops.aten._safe_softmax.default, (numbers(), -1), {}, numbers(), backend="mps")
    twice = type(call)(order=call.order * 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        twice.replay((), enter=lambda tensor: tensor, take=take, give=given.append)

    assert given == taken == [ENTRIES]


def test_fake_tensors_count_nothing_inside_kernels(mac):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with mac.active(kernels=hidden_bytes), FakeTensorMode():
        torch.ops.aten._safe_softmax(torch.zeros(512, 512), -1)

    assert mac.allocator.peak == 0
