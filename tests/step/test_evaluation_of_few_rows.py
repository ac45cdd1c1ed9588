"""Evaluation in micro-batches of one to four rows: logged means are the whole batch's, or are named."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import MergeRules, MicroBatchRules, UnifiedStrategy
from tests.support.lanes import crossed, first_cells

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Logs(L.LightningModule):
    """Logs a mean with a `batch_size` of its own, and a loss that ignores some labels inside the step."""

    def __init__(self, room=99):
        super().__init__()
        self.net, self.room = nn.Linear(6, 3), room

    def validation_step(self, batch, batch_idx):
        x, labels, values = batch
        if len(x) > self.room:
            raise torch.OutOfMemoryError(TEXT)
        self.log("loss", F.cross_entropy(self.net(x), torch.where(labels == 0, -100, labels)))
        self.log("mean", values.mean(), batch_size=5)


def validated(strategy, *, batch_size, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.tensor([1, 2]), torch.randint(0, 3, (19,), generator=generator)])
    rows = TensorDataset(torch.randn(21, 6, generator=generator), labels, torch.rand(21, generator=generator))
    torch.manual_seed(0)
    module = Logs(**options)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **off)
    return trainer.validate(module, DataLoader(rows, batch_size), verbose=False)[0], trainer


SMALL = (1, 2, 3, 4)


@first_cells(1, "seed", range(3))
@pytest.mark.parametrize(("micro", "batch_size"), crossed(SMALL, (3, 5, 8), fast=[(2, 8), (1, 5), (2, 3)]))
def test_means_by_other_weights_than_rows_are_the_whole_batchs(micro, batch_size, seed):
    whole, _ = validated("auto", batch_size=batch_size, seed=seed)
    split, trainer = validated(UnifiedStrategy(evaluation_micro_batch_size=micro), batch_size=batch_size, seed=seed)

    assert split == pytest.approx(whole, rel=1e-5)
    assert not [event for event in trainer.strategy.events if "may differ" in event]


def test_a_mean_that_two_rows_cannot_tell_apart_is_named_once():
    _, trainer = validated(UnifiedStrategy(evaluation_micro_batch_size=2), batch_size=5, room=2)
    said = [event for event in trainer.strategy.events if "may differ from the whole batch's" in event]

    assert [event.partition(",")[0] for event in said] == ["'mean'"]


def test_a_given_rule_leaves_nothing_to_say():
    rules = MicroBatchRules(merge=MergeRules(logs={"mean": "mean of rows"}))
    whole, _ = validated("auto", batch_size=5)
    split, trainer = validated(
        UnifiedStrategy(evaluation_micro_batch_size=2, micro_batches=rules), batch_size=5, room=2
    )

    assert split["mean"] == pytest.approx(whole["mean"], rel=1e-5)
    assert not [event for event in trainer.strategy.events if "'mean'" in event]


class LogsOfTokens(L.LightningModule):
    """Logs means over rows, beside tokens whose counts may fit by chance while losses are alike."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.log("loss", F.cross_entropy(logits, batch["labels"]))
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).float().mean())


@pytest.mark.parametrize(("micro", "batch_size"), [(1, 16), (5, 16), (2, 5)])
def test_weights_that_fit_by_chance_are_not_named(micro, batch_size):
    said = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randint, generator=generator)
        rows = [
            {"x": torch.randn(6, generator=generator) / 30, "labels": draw(4, ()), "tokens": draw(10, (8,))}
            for _ in range(40)
        ]
        strategy = UnifiedStrategy(evaluation_micro_batch_size=micro)
        torch.manual_seed(0)
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, **off)
        trainer.validate(LogsOfTokens(), DataLoader(rows, batch_size), verbose=False)
        said += [event for event in strategy.events if "may differ" in event]

    assert not said
