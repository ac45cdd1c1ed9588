"""Logs, outputs and metrics of split batches are the whole batch's.

A value that no rule merges gives a warning, or in `predict` an error.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_unified import MergeRules, MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import crossed, first_cells, some
from tests.support.modules.plain import Rows

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


class Net(L.LightningModule):
    """Logs and returns what `results` says, in every stage."""

    rules = MicroBatchRules()

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def configure_micro_batches(self, stage):
        return self.rules

    def results(self, out, batch):
        return {}, {}

    def evaluate(self, batch):
        out = self.net(batch["x"])
        logs, outputs = self.results(out, batch)
        for name, value in logs.items():
            self.log(name, value, on_step=False, on_epoch=True, batch_size=self.size_of(batch))
        return out, outputs

    def size_of(self, batch):
        return len(batch["x"])

    def training_step(self, batch, batch_idx):
        out, outputs = self.evaluate(batch)
        return {"loss": F.cross_entropy(out, batch["y"]), **outputs}

    def validation_step(self, batch, batch_idx):
        return self.evaluate(batch)[1]

    def test_step(self, batch, batch_idx):
        return self.evaluate(batch)[1]

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Seen(L.Callback):
    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.outputs.append({name: value for name, value in outputs.items() if name != "loss"})

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(outputs)

    on_test_batch_end = on_validation_batch_end


def loader(rows=22):
    generator = torch.Generator().manual_seed(3)
    data = [
        {"x": torch.randn(6, generator=generator, dtype=torch.float64), "y": row * 7 % 4, "name": f"row {row}"}
        for row in range(rows)
    ]
    return DataLoader(Rows(data), batch_size=8)


def run(kind, stage, *, split, **options):
    """Return what callbacks saw, the logs, and the strategy."""
    torch.manual_seed(0)
    sizes = {"micro_batch_size": 3} if stage == "fit" else {"evaluation_micro_batch_size": 3}
    strategy = UnifiedStrategy(**sizes, **options) if split else "auto"
    module, seen = kind().double(), Seen()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    result = getattr(trainer, stage)(module, loader())
    logs = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return result if stage == "predict" else seen.outputs, logs, strategy


MERGED = {
    "a mean": lambda out, b: ({"v": out.mean()}, {"v": out.mean()}),
    "a sum": lambda out, b: ({"v": out.sum()}, {"v": out.sum()}),
    "a maximum": lambda out, b: ({"v": out.max()}, {"v": out.max()}),
    "a minimum": lambda out, b: ({"v": out.min()}, {"v": out.min()}),
    "a constant": lambda out, b: ({"v": torch.tensor(3.0)}, {"v": 3, "name": "net"}),
    "a number of rows": lambda out, b: ({"v": float(len(out))}, {"n": len(out)}),
    "correct answers": lambda out, b: (
        {"v": (out.argmax(1) == b["y"]).sum().double()},
        {"correct": int((out.argmax(1) == b["y"]).sum()), "n": len(out)},
    ),
    "accuracy": lambda out, b: ({"v": (out.argmax(1) == b["y"]).double().mean()}, {}),
    "rows": lambda out, b: ({}, {"out": out, "names": b["name"], "deep": [{"p": out.softmax(1)}, out.T]}),
}
UNMERGED = {
    "a root of a mean": lambda out, b: ({"v": out.pow(2).mean().sqrt()}, {}),
    "a perplexity": lambda out, b: ({"v": F.cross_entropy(out, b["y"]).exp()}, {}),
    "a spread": lambda out, b: ({"v": out.std()}, {}),
    "a median": lambda out, b: ({"v": out.median()}, {}),
    "a norm": lambda out, b: ({"v": out.norm()}, {}),
    "a norm returned": lambda out, b: ({}, {"v": out.norm()}),
    "similarities returned": lambda out, b: ({}, {"v": out @ out.T}),
    "words": lambda out, b: ({}, {"v": f"{float(out.sum()):.3f}"}),
}
STAGES = ["fit", "validate", "test"]


def giving(results, **attributes):
    return type("Gives", (Net,), {"results": staticmethod(results), **attributes})


def in_turns(names):
    """Return each name with one stage."""
    return [(name, STAGES[turn % len(STAGES)]) for turn, name in enumerate(names)]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, twin in zip(one, other, strict=True):
            assert_same(each, twin)
    elif isinstance(one, (Found, Scored, SimpleNamespace)):
        assert_same(vars(one), vars(other))
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    elif isinstance(one, np.ndarray):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    else:
        assert one == other


@first_cells(1, ("name", "stage"), crossed(MERGED, STAGES, fast=in_turns(MERGED)))
def test_what_can_be_put_together_is_the_whole_batchs(name, stage):
    kind = giving(MERGED[name])
    outputs, logs, _ = run(kind, stage, split=False)
    split_outputs, split_logs, strategy = run(kind, stage, split=True)

    assert_same(split_outputs, outputs)
    assert split_logs == pytest.approx(logs, rel=1e-9)
    assert not [event for event in strategy.events if "no rule merges" in event]


@first_cells(1, ("name", "stage"), crossed(UNMERGED, STAGES, fast=in_turns(UNMERGED)))
def test_what_cannot_be_put_together_is_warned_of_by_name_and_once(name, stage, caplog):
    _, _, strategy = run(giving(UNMERGED[name]), stage, split=True)

    said = [record.message for record in caplog.records if "no rule merges" in record.message]
    assert len(said) == 1
    assert said[0].startswith("'v', logged, returned or updated by ")
    assert [event for event in strategy.events if "no rule merges" in event] == [f"'v'{said[0][3:]}"]


@first_cells(1, "stage", STAGES)
def test_a_rule_that_was_given_is_taken_without_a_warning(stage, caplog):
    def root(values, rows):
        return (sum(value**2 * size for value, size in zip(values, rows, strict=True)) / sum(rows)) ** 0.5

    rules = MicroBatchRules(merge=MergeRules(logs={"v": root}, outputs={"v": root}))
    kind = giving(lambda out, b: ({"v": out.pow(2).mean().sqrt()}, {"v": out.pow(2).mean().sqrt()}), rules=rules)
    outputs, logs, _ = run(kind, stage, split=False)
    split_outputs, split_logs, _ = run(kind, stage, split=True)

    assert_same(split_outputs, outputs)
    assert split_logs == pytest.approx(logs, rel=1e-9)
    assert not [record for record in caplog.records if "no rule merges" in record.message]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "late",
    [
        lambda out, b: ({"v": out.sum()} if "row 8" in b["name"] else {}, {}),
        lambda out, b: ({}, {"v": out.sum()} if "row 8" in b["name"] else {}),
    ],
    ids=["log", "output"],
)
def test_what_is_given_in_later_batches_only_is_found_out_there(late, stage, caplog):
    def whole(out, batch):
        return late(
            out, {**batch, "name": ["row 8"] if any(int(name[4:]) in range(8, 16) for name in batch["name"]) else []}
        )

    outputs, logs, _ = run(giving(whole), stage, split=False)
    split_outputs, split_logs, _ = run(giving(whole), stage, split=True)

    assert_same(split_outputs, outputs)
    assert split_logs == pytest.approx(logs, rel=1e-9)
    assert not [record for record in caplog.records if "no rule merges" in record.message]


@first_cells(1, "stage", STAGES)
def test_a_batch_size_of_its_own_weights_a_log_over_the_epoch(stage):
    """The number of rows of class 0, of which a micro-batch may have none."""
    attributes = {"size_of": lambda self, batch: int((batch["y"] == 0).sum())}
    kind = giving(lambda out, b: ({"v": (out[b["y"] == 0].sum() / (b["y"] == 0).sum().clamp_min(1))}, {}), **attributes)
    _, logs, _ = run(kind, stage, split=False)
    _, split_logs, _ = run(kind, stage, split=True)

    assert split_logs == pytest.approx(logs, rel=1e-9)


class Metrics(Net):
    def __init__(self):
        super().__init__()
        self.accuracy, self.f1, self.auroc = MulticlassAccuracy(4), MulticlassF1Score(4, average="macro"), BinaryAUROC()
        self.loss, self.held = MeanMetric(), {"mean": MeanMetric()}

    def evaluate(self, batch):
        out = self.net(batch["x"])
        self.accuracy(out, batch["y"]), self.f1(out, batch["y"])
        self.auroc(out[:, 0].sigmoid(), (batch["y"] == 0).long())
        self.loss(F.cross_entropy(out, batch["y"])), self.held["mean"](out.mean())
        for name in ("accuracy", "f1", "auroc", "loss"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return out, {}


@pytest.mark.parametrize("stage", some(STAGES, "fit"))
def test_metrics_are_those_of_whole_batches(stage):
    _, logs, _ = run(Metrics, stage, split=False)
    _, split_logs, _ = run(Metrics, stage, split=True)

    assert split_logs == pytest.approx(logs, rel=1e-6)
    assert {"accuracy", "f1", "auroc", "loss"} <= set(logs)


# predictions


@dataclass
class Found:
    name: str
    scores: torch.Tensor


class Scored:
    def __init__(self, scores):
        self.scores = scores


PREDICTED = {
    "rows": lambda net, b: net(b["x"]),
    "columns": lambda net, b: net(b["x"]).T,
    "classes": lambda net, b: net(b["x"]).argmax(1),
    "names": lambda net, b: b["name"],
    "a dict": lambda net, b: {"out": net(b["x"]), "names": b["name"]},
    "a tuple": lambda net, b: (net(b["x"]), b["y"]),
    "an array": lambda net, b: net(b["x"]).numpy(),
    "constants": lambda net, b: {
        "out": net(b["x"]),
        "loader": 0,
        "kind": "a",
        "threshold": 0.5,
        "anchors": net.bias,
        "empty": [],
    },
    "a list of dicts": lambda net, b: [{"name": name, "x": x} for name, x in zip(b["name"], b["x"], strict=True)],
    "a list of records": lambda net, b: [Found(*row) for row in zip(b["name"], net(b["x"]), strict=True)],
    "a list of objects": lambda net, b: [SimpleNamespace(scores=row) for row in net(b["x"])],
    "a list of objects that compare by identity": lambda net, b: [Scored(row) for row in net(b["x"])],
}
GUESSED = {
    "a mean": lambda net, b: net(b["x"]).mean(),
    "a number": lambda net, b: len(b["x"]),
    "a count, 0 at first, then 1 in each part": lambda net, b: sum(
        n in ("row 8", "row 11", "row 14") for n in b["name"]
    ),
    "similarities": lambda net, b: net(b["x"]) @ net(b["x"]).T,
    "sorted rows": lambda net, b: net(b["x"])[:, 0].sort().values,
    "scores over the batch": lambda net, b: net(b["x"]).softmax(0),
    "records of a softmax over the batch": lambda net, b: [Scored(row) for row in net(b["x"]).softmax(0)],
    "the best row": lambda net, b: net(b["x"])[net(b["x"])[:, 0].argmax()],
    "rows above the mean": lambda net, b: net(b["x"])[net(b["x"])[:, 0] > net(b["x"])[:, 0].mean()],
    "a mean in a dict": lambda net, b: {"out": net(b["x"]), "mean": net(b["x"]).mean()},
}


def predicting(predict):
    return type("Predicts", (Net,), {"predict_step": lambda self, batch, batch_idx: predict(self.net, batch)})


@first_cells(2, "name", PREDICTED)
def test_predictions_by_row_are_those_of_whole_batches(name):
    whole, _, _ = run(predicting(PREDICTED[name]), "predict", split=False)
    split, _, _ = run(predicting(PREDICTED[name]), "predict", split=True)

    assert len(split) == len(whole) == 3
    for one, other in zip(split, whole, strict=True):
        assert_same(one, other)


@first_cells(2, "name", GUESSED)
def test_predictions_that_are_not_by_row_are_refused_not_guessed(name):
    with pytest.raises(SplitError, match=r"Predicts\.predict_step returns .*is not known to be .*MicroBatchRules\("):
        run(predicting(GUESSED[name]), "predict", split=True)


def test_a_rule_that_was_given_puts_predictions_together():
    rules = MicroBatchRules(merge=MergeRules(outputs={"": "mean of rows"}))
    kind = type("Given", (predicting(GUESSED["a mean"]),), {"rules": rules})
    whole, _, _ = run(kind, "predict", split=False)
    split, _, _ = run(kind, "predict", split=True)

    assert_same(split, whole)
