"""Modules that write gradients themselves during the backward pass."""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Scales(Net):
    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Decays(Net):
    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters():
            parameter.grad = parameter.grad + 0.1 * parameter.detach()


def changed(parameter):
    parameter.grad.mul_(0.5).add_(0.01)


class Hooked(Net):
    def on_fit_start(self):
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(changed)


class KeepsTheGraph(Net):
    def backward(self, loss):
        loss.backward(retain_graph=True)


class OptimizerInBackward(Net):
    def on_fit_start(self):
        for parameter in self.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


@first_cells(1, "kind", [Scales, Decays, Hooked, KeepsTheGraph])
def test_gradients_written_in_backward_are_those_of_the_whole_batch(kind):
    plain, _ = run(kind, batches(number=3), strategy="auto")
    split, _ = run(kind, batches(number=3))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_marks_that_watch_the_device_change_no_bit_of_a_split_batch():
    watched, plain = (
        run(
            Net,
            batches(number=3),
            strategy=UnifiedStrategy(micro_batch_size=3, simulate="m2-16gb", detect_faults=detects),
            precision="32-true",
        )[0]
        for detects in (True, False)
    )

    assert torch.equal(weights(watched), weights(plain))


def test_an_optimizer_in_the_backward_pass_is_refused():
    with pytest.raises(SplitError, match=r"OptimizerInBackward writes net\.\S+ during the backward pass"):
        run(OptimizerInBackward, batches(number=3))
