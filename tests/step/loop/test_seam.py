"""Pins the parts of Lightning's private loop that `step/loop/optimization.py` uses.

A new Lightning that changes them fails here.
"""

import inspect

import lightning as L
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization

from lightning_unified import UnifiedStrategy
from lightning_unified.step.loop import UnifiedOptimization
from tests.support.modules.plain import MLP, fit


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_closure_and_its_result_have_the_shape_we_subclass():
    assert parameters(Closure.__init__) == ["self", "step_fn", "backward_fn", "zero_grad_fn"]
    assert parameters(ClosureResult) == ["closure_loss", "extra"]
    assert parameters(ClosureResult.from_training_step_output) == ["training_step_output", "normalize"]


def test_the_loop_has_the_methods_we_override_and_call():
    assert parameters(_AutomaticOptimization.run) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert parameters(_AutomaticOptimization._make_closure) == ["self", "kwargs", "optimizer", "batch_idx"]
    assert parameters(_AutomaticOptimization._make_step_fn) == ["self", "kwargs"]
    assert parameters(_AutomaticOptimization._make_zero_grad_fn) == ["self", "batch_idx", "optimizer"]
    assert parameters(_AutomaticOptimization._training_step) == ["self", "kwargs"]


def test_lightnings_closure_still_runs_step_then_zero_grad_then_backward():
    source = inspect.getsource(automatic.Closure.closure)

    assert source.index("_step_fn()") < source.index("_zero_grad_fn()") < source.index("_backward_fn(")


def test_the_strategy_puts_its_loop_in_place_and_keeps_the_progress():
    module = MLP().double()
    _, trainer = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3))

    assert isinstance(trainer.fit_loop.epoch_loop.automatic_optimization, UnifiedOptimization)
    assert trainer.global_step == 6
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, module.loader())
    assert trainer.global_step == 9


def test_a_trainer_without_the_strategy_keeps_lightnings_loop():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)

    assert type(trainer.fit_loop.epoch_loop.automatic_optimization) is _AutomaticOptimization
