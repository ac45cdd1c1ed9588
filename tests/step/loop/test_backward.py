"""The backward passes of a batch list the module's parameters only where a share needs them."""

import pytest

from lightning_unified import UnifiedStrategy
from lightning_unified.step.loop import backward
from tests.support.modules.plain import MLP, fit


@pytest.mark.parametrize(("size", "lists_of_a_batch"), [("auto", 0), (3, 1)])
def test_parameters_are_listed_once_for_a_split_batch_and_never_for_a_whole_one(monkeypatch, size, lists_of_a_batch):
    listed, parameters_of_step = [], backward.parameters_of_step
    monkeypatch.setattr(backward, "parameters_of_step", lambda trainer: listed.append(1) or parameters_of_step(trainer))
    module = MLP().double()
    _, trainer = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=size))

    assert trainer.global_step > 0
    assert len(listed) == lists_of_a_batch * trainer.global_step
