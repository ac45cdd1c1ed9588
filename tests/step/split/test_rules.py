"""Rules come from `configure_micro_batches` or from the strategy.

No other name of a module matters.
"""

from collections import Counter

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from lightning_unified.step.split.rules import rules_of
from tests.step.recovery.test_recovery import Fails
from tests.step.test_evaluation import Evaluates, made, trainer
from tests.support.lanes import first_cells
from tests.support.modules.plain import MLP, RaggedTokens, fit, weights

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class OwnNames:
    """Has attributes with the names of rules and other meanings.

    Methods fail when called, and values have other types.
    """

    loss_weight = 0.25
    loss_reduction = "none"
    micro_batch_unit = "rows"
    splittable = False

    def prepare_batch(self, batch, device):
        raise AssertionError("the module's own prepare_batch was called")

    def split_batch(self, batch):
        raise AssertionError("the module's own split_batch was called")

    def count_rows(self):
        raise AssertionError("the module's own count_rows was called")


class Named(OwnNames, MLP):
    """Uses one of its names in its loss, as modules of others do."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * self.loss_weight}


class NamedEvaluates(OwnNames, Evaluates):
    pass


class Sizes(MLP):
    """Notes the rows of each training step."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows.append(len(batch["x"]))
        return super().training_step(batch, batch_idx)


class Fours(Sizes):
    def configure_micro_batches(self, stage):
        return MicroBatchRules(unit=4)


def trained(kind, *, strategy="auto", callbacks=(), rows=22):
    torch.manual_seed(0)
    module = kind().double()
    seen, run = fit(module, module.loader(rows=rows), strategy=strategy, callbacks=callbacks)
    return module, seen, run


def test_names_of_its_own_leave_a_whole_batch_as_plain_lightning_has_it():
    plain, seen, _ = trained(Named)
    module, own, _ = trained(Named, strategy=UnifiedStrategy())

    assert torch.equal(weights(module), weights(plain))
    assert own.callback_metrics == seen.callback_metrics


@first_cells(1, "size", [1, 3])
def test_names_of_its_own_leave_a_split_batch_as_plain_lightning_has_it(size):
    plain, seen, _ = trained(Named)
    module, own, run = trained(Named, strategy=UnifiedStrategy(micro_batch_size=size))

    assert run.strategy.micro_batch_size == size
    torch.testing.assert_close(weights(module), weights(plain), **CLOSE)
    torch.testing.assert_close(torch.stack(own.gradients), torch.stack(seen.gradients), **CLOSE)


@pytest.mark.slow
@first_cells(1, "phase", ["forward", "backward", "optimizer.step"])
def test_names_of_its_own_leave_a_repeated_step_as_plain_lightning_has_it(phase):
    plain, _, _ = trained(Named)
    module, _, run = trained(Named, strategy=UnifiedStrategy(), callbacks=[Fails(phase)])

    assert run.strategy.recoveries == 1
    torch.testing.assert_close(weights(module), weights(plain), **CLOSE)


def test_names_of_its_own_leave_a_repeated_validation_as_plain_lightning_has_it():
    plain, module = made(kind=NamedEvaluates), made(3, NamedEvaluates)
    figures = trainer("auto").validate(plain, plain.loader(), verbose=False)[0]
    run = trainer("unified")
    own = run.validate(module, module.loader(), verbose=False)[0]

    assert run.strategy.recoveries > 0
    assert own == pytest.approx(figures, rel=1e-12)


def test_rules_given_to_the_strategy_replace_the_modules():
    own, _, _ = trained(Fours, strategy=UnifiedStrategy(micro_batch_size=6, check_split=False), rows=16)
    given = UnifiedStrategy(micro_batch_size=3, micro_batches=MicroBatchRules(unit=2, check=False))
    replaced, _, _ = trained(Fours, strategy=given, rows=16)
    defaults = UnifiedStrategy(micro_batch_size=3, micro_batches=MicroBatchRules(check=False))
    without, _, _ = trained(Fours, strategy=defaults, rows=16)

    assert set(own.rows) == {4}
    assert set(replaced.rows) == {2}
    assert set(without.rows) == {3, 2}


def test_a_rule_the_strategy_leaves_out_is_not_taken_from_the_module():
    plain, _, _ = trained(RaggedTokens)
    by_rows = UnifiedStrategy(micro_batch_size=3, micro_batches=MicroBatchRules(check=False))
    module, _, run = trained(RaggedTokens, strategy=by_rows)

    assert "unchecked" in run.strategy.plan.reasons["loss_weight"]
    assert not torch.allclose(weights(module), weights(plain), rtol=1e-3)


def test_rules_given_for_a_module_without_any_train_it_as_the_whole():
    class Undeclared(RaggedTokens):
        configure_micro_batches = None

    plain, _, _ = trained(Undeclared)
    rules = MicroBatchRules(loss_weight=lambda batch: (batch["labels"] != -100).sum())
    module, _, run = trained(Undeclared, strategy=UnifiedStrategy(micro_batch_size=3, micro_batches=rules))

    assert run.strategy.plan.reasons["loss_weight"].startswith("loss_weight: ")
    torch.testing.assert_close(weights(module), weights(plain), **CLOSE)


@pytest.mark.parametrize("strategy", [UnifiedStrategy, UnifiedDDPStrategy])
@pytest.mark.parametrize("given", [{"unit": 4}, MicroBatchRules, "rows"])
def test_a_strategy_refuses_anything_but_rules(strategy, given):
    with pytest.raises(ConfigurationError, match=r"^micro_batches=.*give MicroBatchRules\(...\)"):
        strategy(micro_batches=given)


@pytest.mark.parametrize("returned", [None, {"unit": 4}, MicroBatchRules])
def test_a_hook_that_returns_anything_but_rules_is_refused_by_name(returned):
    class Wrong(MLP):
        def configure_micro_batches(self, stage):
            return returned

    with pytest.raises(
        ConfigurationError, match=r"^Wrong.configure_micro_batches\('fit'\) returned .*return MicroBatch"
    ):
        trained(Wrong, strategy=UnifiedStrategy())


def test_a_module_without_the_hook_has_the_default_rules():
    assert rules_of(L.LightningModule(), "fit") == MicroBatchRules()


def test_the_hook_is_asked_once_for_each_stage_of_a_run():
    asked = Counter()

    class Asked(Evaluates):
        def configure_micro_batches(self, stage):
            asked[stage] += 1
            return MicroBatchRules()

    module = made(kind=Asked)
    run = trainer(UnifiedStrategy(predict=False), max_epochs=2)
    run.fit(module, module.loader(), module.loader())

    assert asked == {"fit": 1, "validate": 1}


def test_a_dry_run_prepares_on_a_copy_and_plans_with_what_it_returns():
    class Scales(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.prepared = torch.nn.Linear(64, 64), 0
            self.register_buffer("scale", torch.full((64,), 2.0))

        def configure_micro_batches(self, stage):
            return MicroBatchRules(prepare=self.scaled)

        def scaled(self, batch):
            self.prepared += 1
            return {**batch, "scale": self.scale.expand(len(batch["x"]), -1)}

        def training_step(self, batch, batch_idx):
            return (self.layer(batch["x"]) * batch["scale"][:, None]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module, strategy = Scales(), UnifiedStrategy(simulate="rtx3060-12gb", budget="64MiB")
    loader = DataLoader([{"x": torch.ones(8, 16, 64)}] * 4, batch_size=None)
    fit(module, loader, strategy=strategy, precision="32-true", max_epochs=1)

    assert strategy.plan.prediction is not None
    assert module.prepared == 4
    assert module.scale.tolist() == [2.0] * 64
