"""Evaluation steps that run out of memory run as micro-batches.

Their logs and results are the whole batch's.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import OutOfMemoryError, SplitError
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import MLP, RaggedTokens

TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"


class Evaluates(MLP):
    """Logs figures, metrics and a sum; returns predictions.

    After some work it refuses micro-batches of more than `most` rows.
    """

    most = 99

    def evaluate(self, batch):
        x, y = batch["x"], batch["y"]
        logits = self.net(x)
        self.accuracy(logits, y)
        self.error.update(logits.softmax(-1)[:, 0], (y == 0).to(logits))
        self.log("loss", F.cross_entropy(logits, y), on_step=True, on_epoch=True)
        self.log("given", logits.mean(), batch_size=len(x))
        self.log("accuracy", self.accuracy)
        self.log("error", self.error)
        self.log("sum", logits.sum(), reduce_fx="sum")
        torch.rand(1)
        if len(x) > self.most:
            raise RuntimeError(TEXT)
        return logits, batch["name"]

    def validation_step(self, batch, batch_idx):
        logits, _ = self.evaluate(batch)
        return {"logits": logits, "names": batch["name"], "loss": F.cross_entropy(logits, batch["y"])}

    def test_step(self, batch, batch_idx):
        return self.evaluate(batch)[0]

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"]) if len(batch["x"]) <= self.most else self.refuse()

    def refuse(self):
        raise RuntimeError(TEXT)


class Outputs(L.Callback):
    """Notes what callbacks are given."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append((outputs, len(batch["x"])))


def trainer(strategy, *callbacks, **options):
    return L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def made(most=99, kind=Evaluates):
    torch.manual_seed(0)
    module = kind().double()
    module.most = most
    return module


def evaluated(how, *, most=99, strategy=None):
    outputs, module = Outputs(), made(most)
    strategy = strategy or UnifiedStrategy()
    run = trainer(strategy, outputs)
    figures = getattr(run, how)(module, module.loader(), verbose=False)[0]
    return figures, outputs.seen, strategy, torch.get_rng_state()


@first_cells(
    1,
    ("how", "most"),
    crossed(["validate", "test"], [1, 3, 5], fast=[("validate", 3), ("test", 1), ("test", 5)]),
)
def test_figures_of_a_repeated_evaluation_are_those_of_the_undisturbed_one(how, most):
    plain = evaluated(how, strategy="auto")[0]
    figures, _, strategy, _ = evaluated(how, most=most)

    assert strategy.recoveries > 0
    assert figures.keys() == plain.keys()
    for name in plain:
        assert figures[name] == pytest.approx(plain[name], rel=1e-12), name


def test_outputs_of_a_repeated_validation_are_the_whole_batches():
    _, plain, _, _ = evaluated("validate", strategy="auto")
    _, seen, _, _ = evaluated("validate", most=3)

    assert [rows for _, rows in seen] == [8, 8, 6]
    for (mine, _), (other, _) in zip(seen, plain, strict=True):
        torch.testing.assert_close(mine["logits"], other["logits"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine["loss"], other["loss"], rtol=1e-12, atol=1e-12)
        assert mine["names"] == other["names"]


def test_predictions_are_put_one_after_another():
    plain = trainer("auto").predict(made(), MLP.loader())
    strategy = UnifiedStrategy()
    mine = trainer(strategy).predict(made(most=3), MLP.loader())

    assert strategy.recoveries == 2
    assert [len(part) for part in mine] == [8, 8, 6]
    torch.testing.assert_close(torch.cat(mine), torch.cat(plain), rtol=1e-12, atol=1e-12)


def test_a_size_given_for_evaluations_is_used_from_the_first_batch():
    strategy = UnifiedStrategy(evaluation_micro_batch_size=3)
    figures, _, _, _ = evaluated("validate", most=3, strategy=strategy)

    assert strategy.recoveries == 0
    assert figures["loss_epoch"] == pytest.approx(evaluated("validate", strategy="auto")[0]["loss_epoch"], rel=1e-12)


@pytest.mark.slow
def test_validation_inside_fit_leaves_training_as_it_was():
    def trained(most):
        module = made(most)
        strategy = UnifiedStrategy()
        torch.manual_seed(1)
        trainer(strategy, max_epochs=2, num_sanity_val_steps=1).fit(module, module.loader(), module.loader())
        return strategy, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    strategy, disturbed = trained(3)
    other, undisturbed = trained(99)

    assert strategy.recoveries == 2
    assert other.recoveries == 0
    assert strategy.micro_batch_size == 8  # training was not cut for what validation did not fit in
    assert torch.equal(disturbed, undisturbed)


def test_tokens_are_weighted_as_the_module_says():
    class Tokens(RaggedTokens):
        def validation_step(self, batch, batch_idx):
            if len(batch["tokens"]) > 3:
                raise RuntimeError(TEXT)
            self.score(batch)

        def score(self, batch):
            logits = self.head(self.embed(batch["tokens"]).cumsum(1))
            self.log("val", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), on_step=True)

    class Whole(Tokens):
        def validation_step(self, batch, batch_idx):
            self.score(batch)

    torch.manual_seed(0)
    module = Tokens().double()
    torch.manual_seed(0)
    whole = Whole().double()
    mine = trainer("unified").validate(module, module.loader(), verbose=False)[0]
    plain = trainer("auto").validate(whole, whole.loader(), verbose=False)[0]

    assert mine["val_epoch"] == pytest.approx(plain["val_epoch"], rel=1e-12)


def test_an_evaluation_whose_single_row_does_not_fit_says_what_would_help():
    with pytest.raises(OutOfMemoryError, match="the activations of 1 row do not fit: memory ran out in validation"):
        evaluated("validate", most=0)


def test_a_module_that_is_not_to_be_split_is_not_split_in_validation():
    class Whole(Evaluates):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(splittable=False)

    module = made(5, Whole)
    with pytest.raises(OutOfMemoryError, match="memory ran out in validation"):
        trainer("unified").validate(module, module.loader(), verbose=False)


def test_another_error_comes_through_untouched():
    class Breaks(Evaluates):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("shapes do not match")

    module = made(kind=Breaks)
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        trainer("unified").validate(module, module.loader(), verbose=False)


@pytest.mark.parametrize("needed", [2, 8])
@pytest.mark.parametrize(("how", "step"), [("validate", "validation_step"), ("test", "test_step")])
def test_an_error_on_fewer_rows_is_a_refusal_that_names_the_step(how, step, needed):
    class Whole(Evaluates):
        def evaluate(self, batch):
            assert len(batch["x"]) >= needed, "asks for more rows"
            return super().evaluate(batch)

    message = rf"^Whole.{step} fails on \d of \d rows of its batch \(AssertionError: asks for more rows\)"
    with pytest.raises(SplitError, match=message):
        getattr(trainer(UnifiedStrategy()), how)(made(3, Whole), MLP.loader(), verbose=False)


def test_without_recovery_the_original_error_is_raised():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        evaluated("validate", most=3, strategy=UnifiedStrategy(recover=False))

    assert type(caught.value) is RuntimeError


@first_cells(1, "stage", ["fit", "validate", "test"])
def test_a_logger_is_no_state_that_an_evaluation_step_writes(stage, tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"kept": 1.0}, step=0)
    strategy = UnifiedStrategy(evaluation_micro_batch_size=3)
    runner = trainer(strategy, logger=logger, max_epochs=1, num_sanity_val_steps=0)
    torch.manual_seed(0)
    module = Evaluates().double()
    if stage == "fit":
        runner.fit(module, Evaluates.loader(), Evaluates.loader())
    else:
        getattr(runner, stage)(module, Evaluates.loader(), verbose=False)

    assert runner.loggers == [logger]
    assert "loss_epoch" in runner.callback_metrics


@pytest.mark.parametrize("leaves", [True, False])
def test_gradients_that_a_validation_step_leaves_are_named(leaves, caplog):
    class Differentiates(MLP):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                F.cross_entropy(self.net(batch["x"]), batch["y"]).backward()
            if not leaves:
                self.zero_grad()

    runner = trainer(UnifiedStrategy(evaluation_micro_batch_size=3), inference_mode=False)
    runner.validate(made(kind=Differentiates), MLP.loader(), verbose=False)

    assert ("the backward pass of validation_step runs once for each" in caplog.text.lower()) == leaves
