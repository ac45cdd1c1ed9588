"""Metrics and logs of every kind are the whole batch's, in each step and epoch.

A warning names each exception.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import AUROC, Accuracy, CatMetric, MeanMetric, Metric, MetricCollection, RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)
from torchmetrics.regression import ExplainedVariance, MeanSquaredError, R2Score, SpearmanCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit
from tests.support.modules.step_kinds import CLASSES, Kind


class Held(Kind):
    """Updates what `make_metric` returns with its logits and classes, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = self.make_metric()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.metric(logits.softmax(-1), batch["y"])
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch["y"])


class Right(Metric):
    """Counts right answers; says nothing of whether its update needs the full state."""

    full_state_update = None

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, probabilities, y):
        self.right += (probabilities.argmax(-1) == y).sum()
        self.seen += len(y)

    def compute(self):
        return self.right / self.seen


class Running(Right):
    """Its update reads what was there before, so that it needs the full state."""

    full_state_update = True

    def update(self, probabilities, y):
        self.right = 0.5 * self.right + (probabilities.argmax(-1) == y).sum()
        self.seen = 0.5 * self.seen + len(y)


METRICS = {
    "Accuracy": lambda: Accuracy("multiclass", num_classes=CLASSES),
    "accuracy by class": lambda: MulticlassAccuracy(CLASSES, average="macro"),
    "F1": lambda: MulticlassF1Score(CLASSES, average="macro"),
    "AUROC": lambda: AUROC("multiclass", num_classes=CLASSES),
    "AUROC in bins": lambda: MulticlassAUROC(CLASSES, thresholds=10),
    "Jaccard": lambda: MulticlassJaccardIndex(CLASSES),
    "calibration": lambda: MulticlassCalibrationError(CLASSES),
    "custom": Right,
}


def run(kind, strategy="auto"):
    torch.manual_seed(0)
    return fit(kind().double(), kind.loader(), strategy=strategy)


def compared(kind):
    expected, plain = run(kind)
    seen, ours = run(kind, UnifiedStrategy(micro_batch_size=3))
    return expected.callback_metrics, seen.callback_metrics, plain, ours


def assert_same(kind):
    expected, seen, plain, ours = compared(kind)

    assert seen == [pytest.approx(one, rel=1e-6, abs=1e-7, nan_ok=True) for one in expected]
    final = {name: float(value) for name, value in plain.callback_metrics.items()}
    assert {name: float(value) for name, value in ours.callback_metrics.items()} == pytest.approx(final, nan_ok=True)
    return ours


@first_cells(1, "name", METRICS)
def test_a_logged_metric_is_the_whole_batchs(name):
    assert assert_same(type("Holding", (Held,), {"make_metric": lambda self: METRICS[name]()})).strategy.events == []


def test_a_metric_that_needs_the_full_state_is_named_where_it_differs():
    expected, seen, _, ours = compared(type("Holding", (Held,), {"make_metric": lambda self: Running()}))

    assert seen == [pytest.approx(one) for one in expected] or any("'metric'" in one for one in ours.strategy.events)


class OfLosses(Held):
    """Keeps a figure of each batch's loss, and logs at the end of the epoch what it makes of them."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.metric.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("metric", self.metric.compute().mean())


class ListOfLosses(OfLosses):
    def make_metric(self):
        return CatMetric()


class WindowOfLosses(OfLosses):
    def make_metric(self):
        return RunningMean(3)


def test_a_list_of_losses_has_one_entry_for_each_batch():
    ours = assert_same(ListOfLosses)

    assert len(ours.lightning_module.metric.value) == 2 * len(ListOfLosses.loader())  # two epochs
    assert ours.strategy.events == []


def test_a_window_over_batches_is_named():
    _, _, _, ours = compared(WindowOfLosses)

    assert any("WindowOfLosses.metric" in event for event in ours.strategy.events)


class InDict(Held):
    """Keeps its metric where no submodule is found."""

    def make_metric(self):
        return {"accuracy": MulticlassAccuracy(CLASSES)}

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.metric["accuracy"].update(logits, batch["y"])
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self):
        self.log("metric", self.metric["accuracy"].compute())
        self.metric["accuracy"].reset()


class Collection(Held):
    def make_metric(self):
        metrics = [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES), MulticlassConfusionMatrix(CLASSES)]
        return MetricCollection({type(one).__name__: one for one in metrics}, prefix="train/")

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        values = self.metric(logits, batch["y"])
        self.log_dict({name: value for name, value in values.items() if not value.dim()}, on_step=True, on_epoch=False)
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self):
        for name, value in self.metric.compute().items():
            self.log(f"{name}/total", value.float().square().sum())
        self.metric.reset()


class LoggedCollection(Collection):
    """Logs the collection itself."""

    def make_metric(self):
        return MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.metric.update(logits, batch["y"])
        self.log_dict(self.metric, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self):
        pass


class MeanOfLosses(Held):
    """Gives a mean metric one value a step."""

    def make_metric(self):
        return MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.metric(loss)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss


class MeanOfRows(MeanOfLosses):
    """Gives a mean metric one value a row, weighted."""

    def training_step(self, batch, batch_idx):
        terms = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        self.metric(terms.detach(), weight=batch["x"].norm(dim=1))
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return terms.mean()


class Regression(Held):
    def make_metric(self):
        return nn.ModuleList([MeanSquaredError(squared=False), SpearmanCorrCoef(), ExplainedVariance()])

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])[:, 0]
        for metric in self.metric:
            metric(out, batch["x"][:, 0])
            self.log(type(metric).__name__, metric, on_step=True, on_epoch=True)
        return F.mse_loss(out, batch["x"][:, 0])


class Options(Kind):
    """Logs with every option that changes how Lightning reduces."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        rows = len(batch["y"])
        self.log("sized", loss, on_step=True, on_epoch=True, batch_size=rows)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("in epochs", loss, on_step=False, on_epoch=True)
        self.log("summed", batch["x"].sum(), on_epoch=True, reduce_fx="sum")
        self.log("largest", batch["x"].max(), on_epoch=True, reduce_fx=torch.max)
        self.log("rows", float(rows), on_epoch=True, reduce_fx="sum")
        self.log("constant", 3.5)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("right", (self.net(batch["x"]).argmax(-1) == batch["y"]).float().mean(), on_epoch=True)
        return loss


class NotMeans(Kind):
    """Logs a root, a ratio and a median: nothing puts those of micro-batches together."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("root", F.mse_loss(self.net(batch["x"])[:, 0], batch["x"][:, 0]).sqrt())
        self.log("perplexity", loss.exp())
        self.log("median", batch["x"].median())
        return loss


@first_cells(
    1,
    "kind",
    [InDict, LoggedCollection, MeanOfLosses, MeanOfRows, Regression, Options],
    ids=lambda kind: kind.__name__,
)
def test_metrics_and_logs_are_the_whole_batchs(kind):
    assert assert_same(kind).strategy.events == []


def assert_same_or_named(kind):
    expected, seen, plain, ours = compared(kind)
    for name in expected[0]:
        same = [one[name] for one in seen] == pytest.approx([one[name] for one in expected])
        assert same or any(f"'{name}'" in event for event in ours.strategy.events), name
    return plain, ours


def test_values_that_a_step_asks_a_collection_for_are_the_whole_batchs_or_named():
    plain, ours = assert_same_or_named(Collection)

    totals = {name: value for name, value in plain.callback_metrics.items() if name.endswith("/total")}
    assert len(totals) == 3
    for name, value in totals.items():
        torch.testing.assert_close(ours.callback_metrics[name], value)


class Total(Held):
    """Logs what its metric makes of all batches so far, and of this batch."""

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.log("of batch", self.metric(logits, batch["y"]))
        self.log("so far", float(self.metric.compute()))
        return F.cross_entropy(logits, batch["y"])

    def make_metric(self):
        return MulticlassAccuracy(CLASSES, average="micro")


def test_a_total_that_a_step_asks_a_metric_for_is_named():
    expected, seen, _, ours = compared(Total)

    assert any("'so far'" in event for event in ours.strategy.events)
    assert expected != seen


class MeanOfClasses(Held):
    """Logs a number that it computes from totals."""

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.metric.update(logits, batch["y"])
        self.log("mean", 100 * self.metric.compute().mean())
        return F.cross_entropy(logits, batch["y"])

    def make_metric(self):
        return MulticlassF1Score(CLASSES, average="none")


def test_a_number_computed_from_totals_is_named():
    expected, seen, _, ours = compared(MeanOfClasses)

    assert any("'mean'" in event for event in ours.strategy.events)
    assert expected != seen


class Batchwise(Total):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.log("of batch", self.metric(logits, batch["y"]))
        return F.cross_entropy(logits, batch["y"])


def test_the_value_of_a_batch_is_no_total():
    assert assert_same(Batchwise).strategy.events == []


def test_a_metric_that_fails_on_a_single_row_is_refused():
    class Determination(Regression):
        def make_metric(self):
            return nn.ModuleList([R2Score()])

    with pytest.raises(SplitError, match="fails on 1 of 8 rows"):
        run(Determination, UnifiedStrategy(micro_batch_size=1))


def test_logs_that_nothing_puts_together_are_named():
    expected, seen, _, ours = compared(NotMeans)

    for name in ("root", "perplexity", "median"):
        assert any(f"'{name}'" in event for event in ours.strategy.events), name
    assert [one["median"] for one in seen] != [one["median"] for one in expected]


@first_cells(
    1,
    "wrapper",
    [
        lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
        lambda: MinMaxMetric(MulticlassAccuracy(CLASSES)),
    ],
    ids=["by class", "extremes"],
)
def test_wrapped_metrics_are_the_whole_batchs_or_named(wrapper):
    class Wrapped(Held):
        def make_metric(self):
            return wrapper()

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])
            self.log_dict({name: value.clone() for name, value in self.metric(logits, batch["y"]).items()})
            return F.cross_entropy(logits, batch["y"])

    assert_same_or_named(Wrapped)


class Perplexity(Kind):
    """Updates a mean by a value that no rule puts together, and logs it at the end of the epoch."""

    def __init__(self):
        super().__init__()
        self.perplexity = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.perplexity.update(loss.exp())
        return loss

    def on_train_epoch_end(self):
        self.log("perplexity", self.perplexity.compute())


def test_a_mean_of_what_nothing_puts_together_is_of_micro_batches_and_named():
    _, plain = run(Perplexity)
    _, ours = run(Perplexity, UnifiedStrategy(micro_batch_size=3))

    whole, parts = (float(one.callback_metrics["perplexity"]) for one in (plain, ours))
    assert parts == pytest.approx(whole, rel=0.2) and parts != pytest.approx(whole)
    assert [event for event in ours.strategy.events if "'Perplexity.perplexity'" in event and "no rule merges" in event]


class ByClass(Kind):
    """Updates the metric of a class where a micro-batch has rows of it."""

    def __init__(self):
        super().__init__()
        self.by_class = torch.nn.ModuleDict(
            {str(label): MulticlassAccuracy(CLASSES, average="micro") for label in range(CLASSES)}
        )

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        for label, metric in self.by_class.items():
            rows = batch["y"] == int(label)
            if rows.any():
                metric.update(out[rows], batch["y"][rows])
        return F.cross_entropy(out, batch["y"])

    def on_train_epoch_end(self):
        self.log_dict({label: metric.compute() for label, metric in self.by_class.items()})


def test_metrics_that_only_some_micro_batches_update_are_the_whole_batchs():
    _, plain = run(ByClass)
    _, ours = run(ByClass, UnifiedStrategy(micro_batch_size=1))

    assert ours.callback_metrics == plain.callback_metrics
    assert not [event for event in ours.strategy.events if "no rule merges" in event]


class Emptied(Held):
    """Empties its metric in some steps, before or after the update."""

    is_first = True

    def make_metric(self):
        return MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        if batch_idx == 1 and self.is_first:
            self.metric.reset()
        self.metric.update(logits, batch["y"])
        if batch_idx == 1 and not self.is_first:
            self.metric.reset()
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self):
        self.log("metric", self.metric.compute())


class EmptiedAfter(Emptied):
    is_first = False


@pytest.mark.parametrize("kind", [Emptied, EmptiedAfter], ids=lambda kind: kind.__name__)
def test_a_metric_that_the_step_resets_holds_what_came_since(kind):
    ours = assert_same(kind)

    metric = ours.lightning_module.metric
    rows = sum(len(batch["y"]) for batch in list(kind.loader())[1 if kind.is_first else 2 :])
    assert int((metric.tp + metric.fn).sum()) == rows


class EmptiedForSome(Emptied):
    """Empties its metric where the first row is of class 0."""

    def training_step(self, batch, batch_idx):
        self.metric.update(self.net(batch["x"]), batch["y"])
        if batch["x"][0, 0] > 0:
            self.metric.reset()
        return self.loss(batch)


def test_a_metric_that_only_some_micro_batches_reset_is_refused():
    with pytest.raises(SplitError, match=r"resets the metric EmptiedForSome\.metric"):
        run(EmptiedForSome, UnifiedStrategy(micro_batch_size=3))
