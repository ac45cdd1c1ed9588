"""An error that a user's code raises is the very object that the Trainer raises."""

import lightning as L
import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from tests.support.lanes import first_cells
from tests.support.modules.hooks import Small

KINDS = [ValueError, RuntimeError, AssertionError, IndexError, KeyError, TypeError, OSError, NotImplementedError]
HOOKS = (
    "on_fit_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_train_epoch_end",
)


def mine(kind):
    return type("Mine", (kind,), {})("bad configuration")


def raises(error):
    def step(*_, **__):
        raise error

    return step


def strategy_of(size):
    options = {"whole": {}, "split": {"micro_batch_size": 3}, "rules": {"micro_batch_size": 3, "check_split": False}}
    return UnifiedStrategy(**options[size])


def trainer_of(size, callbacks=(), **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    strategy = strategy_of(size) if isinstance(size, str) else size
    return L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, callbacks=list(callbacks), **quiet, **options)


class Whole(Small):
    """Has every step."""

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        return self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])

    @staticmethod
    def loader():
        rows = [
            {key: one[key].float() if key == "x" else one[key] for key in one} for one in Small.loader().dataset.rows
        ]
        return torch.utils.data.DataLoader(rows, batch_size=8)


def fitted(module, size, **options):
    trainer_of(size, **options).fit(module, module.loader(), module.loader())


@first_cells(4, "kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", ["whole", "split", "rules"])
def test_an_error_of_training_step_comes_through_untouched(size, kind):
    module, error = Whole(), mine(kind)
    module.training_step = raises(error)
    with pytest.raises(type(error)) as caught:
        fitted(module, size)

    assert caught.value is error


@pytest.mark.parametrize("size", ["whole", "split"])
def test_an_error_of_a_later_training_step_comes_through_untouched(size):
    module, error = Whole(), mine(ValueError)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: raises(error)() if batch_idx == 1 else step(batch, batch_idx)
    with pytest.raises(type(error)) as caught:
        fitted(module, size)

    assert caught.value is error and module.trainer.global_step == 1


@first_cells(2, "kind", KINDS[:4], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("rows", ["auto", 3])
def test_an_error_of_an_evaluation_comes_through_untouched(stage, kind, rows):
    module, error = Whole(), mine(kind)
    setattr(module, {"validate": "validation_step"}.get(stage, f"{stage}_step"), raises(error))
    trainer = trainer_of(UnifiedStrategy(evaluation_micro_batch_size=rows))
    with pytest.raises(type(error)) as caught:
        getattr(trainer, stage)(module, module.loader())

    assert caught.value is error


@first_cells(5, "hook", HOOKS)
@pytest.mark.parametrize("size", ["whole", "split"])
def test_an_error_of_a_callback_comes_through_untouched(size, hook):
    error, callback = mine(ValueError), L.Callback()
    setattr(callback, hook, raises(error))
    trainer = trainer_of(size, callbacks=[callback])
    with pytest.raises(type(error)) as caught:
        trainer.fit(Whole(), Whole.loader(), Whole.loader())

    assert caught.value is error


@first_cells(2, "name", ["backward", "optimizer_step", "configure_gradient_clipping", "on_before_batch_transfer"])
@pytest.mark.parametrize("size", ["whole", "split"])
def test_an_error_of_a_module_hook_comes_through_untouched(size, name):
    module, error = Whole(), mine(RuntimeError)
    setattr(module, name, raises(error))
    with pytest.raises(type(error)) as caught:
        fitted(module, size)

    assert caught.value is error


@pytest.mark.parametrize("rule", ["loss_weight", "prepare"])
def test_an_error_of_a_rule_comes_through_untouched(rule):
    error = mine(ValueError)
    strategy = UnifiedStrategy(micro_batch_size=3, micro_batches=MicroBatchRules(**{rule: raises(error)}))
    with pytest.raises(type(error)) as caught:
        fitted(Whole(), strategy)

    assert caught.value is error


@pytest.mark.parametrize("size", ["whole", "split"])
def test_an_error_of_the_planned_step_comes_through_untouched(size):
    error, module = mine(ValueError), Whole()
    module.net.append(torch.nn.Linear(3, 3))
    module.net[-1].forward = raises(error)  # in the dry run as well
    strategy = UnifiedStrategy(simulate="h200", budget="64MiB", **({} if size == "whole" else {"micro_batch_size": 3}))
    with pytest.raises(type(error)) as caught:
        fitted(module, strategy)

    assert caught.value is error
