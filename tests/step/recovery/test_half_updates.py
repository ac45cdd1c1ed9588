"""Weights that an optimizer wrote in part are rolled back, or the run stops."""

import pytest
import torch

from lightning_unified.errors import HalfUpdatedError
from tests.support.modules.plain import MLP, weights
from tests.support.runs.recovering import TEXT, ShrinksAt, run


class WritesThenFails(torch.optim.SGD):
    """Writes half of the weights, then runs out of memory once, in its third step."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        type(self).calls += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if type(self).calls == 3 and index == len(parameters) // 2:
                raise RuntimeError(TEXT)
            parameter.add_(parameter.grad, alpha=-0.05)


class HalfWriter(MLP):
    def configure_optimizers(self):
        WritesThenFails.calls = 0
        return WritesThenFails(self.parameters(), 0.05)


def test_half_updated_weights_stop_the_run_instead_of_being_kept():
    with pytest.raises(HalfUpdatedError, match="optimizer_rollback=True"):
        run(HalfWriter)


class TwoGroups(MLP):
    """A fused optimizer without memory for the state of its second group.

    The first group has been written by then.
    """

    def configure_optimizers(self):
        first, last = self.net[0], self.net[-1]
        optimizer = torch.optim.AdamW([{"params": first.parameters()}, {"params": last.parameters()}], 0.05, fused=True)
        create_state = optimizer._init_group
        calls = []

        def fails_in_the_second_group(group, *args, **kwargs):
            calls.append(group)
            if len(calls) == 2:
                raise RuntimeError(TEXT)
            return create_state(group, *args, **kwargs)

        optimizer._init_group = fails_in_the_second_group
        return optimizer


def test_a_fused_group_that_was_written_is_noticed_though_no_version_counter_moved():
    with pytest.raises(HalfUpdatedError, match="some are written already"):
        run(TwoGroups)


@pytest.mark.slow
def test_a_fused_group_that_was_written_is_rolled_back_if_a_copy_was_asked_for():
    _, _, trainer = run(TwoGroups, optimizer_rollback=True)

    assert (trainer.strategy.recoveries, trainer.global_step) == (1, 6)


def test_half_updated_weights_are_rolled_back_if_a_copy_was_asked_for():
    module, _, trainer = run(HalfWriter, optimizer_rollback=True)

    class Whole(MLP):
        def configure_optimizers(self):
            WritesThenFails.calls = 10
            return WritesThenFails(self.parameters(), 0.05)

    twin, _, _ = run(Whole, ShrinksAt(trainer.strategy.micro_batch_size, 2))

    assert trainer.strategy.recoveries == 1
    assert torch.equal(weights(module), weights(twin))
