"""A split batch equals the whole batch in modules with unusual steps.

Hooks log, closures run twice, and batches and outputs have odd structures.
"""

import weakref
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging
from torch.nn import functional as F
from torchmetrics import MaxMetric, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells, slow
from tests.support.modules.plain import MLP, RaggedTokens
from tests.support.runs.split_and_whole import EXACT, run, same_cut_and_whole


@pytest.mark.slow
def test_hooks_log_what_they_log_of_a_whole_batch():
    class Logs(MLP):
        def on_train_batch_start(self, batch, batch_idx):
            self.log("start", float(batch_idx), on_step=True, on_epoch=True)

        def on_before_backward(self, loss):
            self.log("before_backward", loss, on_step=True, on_epoch=True)

        def on_after_backward(self):
            self.log("after_backward", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

        def on_before_optimizer_step(self, optimizer):
            self.log("before_step", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("end", outputs["loss"], on_step=True, on_epoch=True)

    same_cut_and_whole(Logs)


def test_numbers_of_every_kind_are_logged_as_of_a_whole_batch():
    class Logs(MLP):
        def training_step(self, batch, batch_idx):
            loss, rows = super().training_step(batch, batch_idx)["loss"], len(batch["x"])
            both = {"on_step": True, "on_epoch": True}
            self.log("one", loss.reshape(1), **both)
            self.log("int", 3, **both)
            self.log("bool", torch.tensor(True), **both)
            self.log("rows", torch.tensor(rows), reduce_fx=torch.sum, **both)
            self.log("builtin", loss * 0 + 2, reduce_fx=max, **both)
            self.log("graph", loss, enable_graph=True, **both)
            self.log("bar", loss, prog_bar=True, on_step=False, on_epoch=True)
            self.log("half sum", torch.tensor(9216.0 * rows, dtype=torch.float16), reduce_fx="sum", on_step=True)
            self.log("half mean", torch.tensor(60000.0, dtype=torch.float16), batch_size=rows, on_step=True)
            self.log_dict({"a": loss, "b": loss * 2}, batch_size=rows)
            for factor in (1, 3):
                self.log("twice", loss * factor, **both)
            return loss

    same_cut_and_whole(Logs, loader=lambda: MLP.loader(batch_size=7))


class RootMeanSquare(Metric):
    """Its value of a batch is not the average of its values of the batch's parts."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("squares", torch.tensor(0.0), "sum")
        self.add_state("count", torch.tensor(0.0), "sum")

    def update(self, values):
        self.squares = self.squares + values.pow(2).sum()
        self.count = self.count + values.numel()

    def compute(self):
        return (self.squares / self.count).sqrt()


class Unsaid(RootMeanSquare):
    full_state_update = None


@pytest.mark.slow
def test_metrics_that_need_their_full_state_give_the_whole_batchs_step_value():
    class Measures(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.full, self.unsaid, self.greatest, self.pearson = (
                RootMeanSquare(),
                Unsaid(),
                MaxMetric(),
                PearsonCorrCoef(),
            )

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])
            self.full(logits)
            self.unsaid(logits)
            self.greatest(logits.max())
            self.pearson(logits[:, 0], logits[:, 1])
            for name in ("full", "unsaid", "greatest", "pearson"):
                self.log(name, getattr(self, name), on_step=True, on_epoch=True)
            return F.cross_entropy(logits, batch["y"])

    same_cut_and_whole(Measures)


@first_cells(1, "calls", ["forward", "update"])
def test_collections_with_compute_groups_agree(calls):
    class Collects(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.all = MetricCollection(
                [MulticlassPrecision(4), MulticlassF1Score(4), MulticlassAUROC(4, thresholds=None)]
            )

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])
            (self.all if calls == "forward" else self.all.update)(logits.softmax(-1), batch["y"])
            self.log_dict(self.all, on_step=calls == "forward", on_epoch=True)
            return F.cross_entropy(logits, batch["y"])

    same_cut_and_whole(Collects)


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    values: torch.Tensor
    name: str


def test_outputs_of_every_kind_are_the_whole_batchs():
    class Returns(MLP):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])
            loss = F.cross_entropy(logits, batch["y"])
            some = {"sometimes": logits.sum()} if (batch["y"] == 2).any() else {}
            return {
                "loss": loss,
                "nested": {"deep": [logits, (loss, None)]},
                "pair": Pair(logits, loss),
                "record": Record(logits, "n"),
                "array": batch["x"].numpy(),
                "flag": True,
                "text": "hello",
                "maybe": logits if some else None,
                **some,
            }

    seen, plain = same_cut_and_whole(Returns)
    for mine, theirs in zip(seen.outputs, plain.outputs, strict=True):
        whole = theirs["pair"].left.detach()
        torch.testing.assert_close(mine["nested"]["deep"][0], whole, **EXACT)
        torch.testing.assert_close(mine["nested"]["deep"][1][0], theirs["loss"], **EXACT)
        torch.testing.assert_close(mine["pair"].left, whole, **EXACT)
        torch.testing.assert_close(mine["record"].values, whole, **EXACT)
        assert np.array_equal(mine["array"], theirs["array"])
        assert (mine["flag"], mine["text"], mine["nested"]["deep"][1][1]) == (True, "hello", None)


def test_outputs_do_not_keep_one_micro_batchs_graph_during_the_next():
    class Keeps(MLP):
        alive = []

        def training_step(self, batch, batch_idx):
            assert not any(reference() is not None for reference in self.alive)
            middle = self.net[0](batch["x"]).exp()
            self.alive.append(weakref.ref(middle))
            return {"loss": self.net(batch["x"]).mean(), "pair": Pair(middle**2, 1), "record": Record(middle**2, "")}

    run(Keeps, UnifiedStrategy(micro_batch_size=3, check_split=False))

    assert len(Keeps.alive) == 16


@first_cells(1, "kind", [lambda n: n, lambda n: n.reshape(1), lambda n: n.numpy(), lambda n: np.float32(n)])
def test_loss_weights_may_be_tensors_and_numpy_numbers(kind):
    class Weighs(RaggedTokens):
        def terms(self, batch):
            return kind((batch["labels"] != -100).sum())

    same_cut_and_whole(Weighs)


def test_a_batch_without_any_loss_term_is_what_the_module_makes_of_it():
    class Careful(RaggedTokens):
        def training_step(self, batch, batch_idx):
            logits = self.head(self.embed(batch["tokens"]).cumsum(1))
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            return loss / (batch["labels"] != -100).sum().clamp(min=1)

    def loader():
        loader = RaggedTokens.loader()
        for row in loader.dataset.rows[8:16]:
            row["labels"] = torch.full_like(row["labels"], -100)
        return loader

    same_cut_and_whole(Careful, loader=loader)


def test_a_negative_loss_weight_is_refused():
    class Wrong(RaggedTokens):
        def terms(self, batch):
            return -1

    with pytest.raises(SplitError, match=r"loss_weight gave \[-1\.0, .*0 or more"):
        run(Wrong, UnifiedStrategy(micro_batch_size=3))


class StepsTwice(torch.optim.SGD):
    """Runs its closure twice a step, as sharpness-aware optimizers do."""

    def step(self, closure=None):
        closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.01)
        return super().step(closure)


@pytest.mark.slow
@first_cells(1, "optimizer", [StepsTwice, torch.optim.LBFGS])
def test_a_closure_that_runs_several_times_a_step_logs_and_measures_each_time(optimizer):
    class Repeats(MLP):
        def configure_optimizers(self):
            options = {"max_iter": 3} if optimizer is torch.optim.LBFGS else {}
            return optimizer(self.parameters(), 0.05, **options)

    same_cut_and_whole(Repeats)


@first_cells(
    1,
    "options",
    [
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"detect_anomaly": True, "profiler": "simple"},
        slow({"overfit_batches": 1}),
        slow({"fast_dev_run": True}),
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]},
        {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)], "max_epochs": 4},
        slow({"callbacks": lambda: [EMAWeightAveraging()]}),
    ],
    ids=["clip by value", "anomaly and profiler", "overfit", "trial", "accumulation", "swa", "ema"],
)
def test_the_trainers_own_options_agree(options):
    same_cut_and_whole(MLP, **options)
