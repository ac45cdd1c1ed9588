"""Class weights of a cross-entropy are found in its graph, and weight micro-batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.labels import Scoring
from lightning_unified.step.exactness.facts.terms import Terms
from lightning_unified.step.exactness.losses import LossRule, candidates, restored
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, found, run

WEIGHTS = (1.0, 2.0, 0.25, 8.0)


class Weighted(Net):
    """Logs its loss too."""

    options = {}

    def class_weights(self, out):
        return torch.tensor(WEIGHTS).to(out)

    def loss(self, out, batch):
        loss = F.cross_entropy(out, batch["y"], weight=self.class_weights(out), **self.options)
        self.log("weighted", loss, on_step=False, on_epoch=True)
        return loss


class Ignoring(Weighted):
    options = {"ignore_index": 1}


class Smoothed(Weighted):
    options = {"label_smoothing": 0.1}


class Summed(Weighted):
    options = {"reduction": "sum"}

    def class_weights(self, out):
        return 0.05 * super().class_weights(out)


class WithoutAClass(Weighted):
    def class_weights(self, out):
        return super().class_weights(out).index_fill(0, torch.tensor([2]), 0.0)


class Growing(Weighted):
    """Has other weights in each step."""

    def class_weights(self, out):
        return super().class_weights(out) ** (1 + 0.05 * self.global_step)


class InEpochs(Weighted):
    """Has other weights in each epoch, and those of the first one again in the third."""

    def class_weights(self, out):
        found = super().class_weights(out)
        return found if self.current_epoch % 2 == 0 else found.flip(0)


class Late(Weighted):
    """Has weights from the tenth step on."""

    def class_weights(self, out):
        return super().class_weights(out) if self.global_step >= 9 else torch.ones(4).to(out)


class ByPosition(Net):
    """Scores the tokens of rows but the first, by class."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12))

    def loss(self, out, batch):
        weight = torch.tensor(WEIGHTS).to(out)
        return F.cross_entropy(out.view(-1, 3, 4).flatten(0, 1), batch["tokens"][:, 1:].flatten(), weight=weight)


def loader():
    """Return batches whose classes are unlike in number, within and among micro-batches."""
    generator = torch.Generator().manual_seed(3)

    def labels(batch, row):
        del batch, row
        y = int(torch.multinomial(torch.tensor([6.0, 3.0, 2.0, 1.0]), 1, generator=generator))
        return {"y": y, "tokens": torch.randint(4, (4,), generator=generator)}

    return batches(number=13, size=8, change=labels)


@first_cells(
    4,
    "kind",
    [Weighted, Growing, InEpochs, ByPosition, Ignoring, Smoothed, Summed, WithoutAClass, Late],
    ids=lambda kind: kind.__name__,
)
def test_a_loss_with_class_weights_trains_as_whole_batches_do(kind):
    data, epochs = loader(), 3 if kind is InEpochs else 1
    split, trainer = run(kind, data, max_epochs=epochs)
    whole, plain = run(kind, data, strategy="auto", max_epochs=epochs)

    assert torch.allclose(weights(split), weights(whole), rtol=1e-9, atol=1e-11)
    for name, value in plain.callback_metrics.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6)


def test_the_rule_is_named_by_the_weights():
    _, trainer = run(Weighted, loader())

    assert found(trainer).startswith("class weights 1, 2, 0.25, 8 of 'y': gradients of 8 rows")


@pytest.mark.parametrize("mean", ["batches", "terms"])
def test_windows_of_batches_with_class_weights_train_as_plain_ones(mean):
    data = loader()
    options = {"accumulate_grad_batches": 3}
    strategy = UnifiedStrategy(micro_batch_size=3, window_mean=mean)
    split, _ = run(Weighted, data, strategy=strategy, **options)
    whole, _ = run(Weighted, data, strategy=UnifiedStrategy(window_mean=mean), **options)

    assert torch.allclose(weights(split), weights(whole), rtol=1e-9, atol=1e-11)


class Balanced(Net):
    """Weights classes by their number in the batch."""

    def loss(self, out, batch):
        return F.cross_entropy(out, batch["y"], weight=1 / (1 + torch.bincount(batch["y"], minlength=4)).to(out))


class OfTwoMeans(Weighted):
    """Adds a mean over rows to one over weights."""

    def loss(self, out, batch):
        return super().loss(out, batch) + out.square().mean()


def test_class_weights_by_counts_of_the_batch_are_refused():
    with pytest.raises(SplitError, match="Balanced cannot be split exactly"):
        run(Balanced, loader())


def test_a_mean_over_rows_beside_one_over_class_weights_splits_exactly():
    split, trainer = run(OfTwoMeans, loader())
    whole, _ = run(OfTwoMeans, loader(), strategy="auto")

    assert "class weights" in found(trainer)
    assert torch.allclose(weights(split), weights(whole), rtol=1e-9, atol=1e-11)


def test_fields_with_other_values_are_no_classes():
    scoring = Scoring(-100, WEIGHTS)
    fields = {"y": [0, 3, -100], "ids": [5, 1, 2], "gaps": [-1, 0, 1], "mask": [1, 0, 1]}
    batch = {name: torch.tensor(values) for name, values in fields.items()}
    counts = [rule.count for rule in candidates(batch, 3, scorings=[scoring]) if rule.class_weights]

    assert [count.path for count in counts if isinstance(count, Terms)] == ["y", "gaps", "mask"]
    assert counts[0] is not None
    assert float(counts[0](batch)) == WEIGHTS[0] + WEIGHTS[3]


def test_a_rule_with_class_weights_is_restored():
    rule = LossRule("class weights 1, 2 of 'y'", Terms("y", -100, weights=(1.0, 2.0)))

    assert restored(rule.state_dict(), MicroBatchRules()) == rule
