"""Steps that go by the lengths of their rows get micro-batches that are trimmed to their longest rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from lightning_unified import MergeRules, MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.split.padding import lengths_in, trimmed
from lightning_unified.step.split.roles import Role
from tests.support.modules.plain import Rows, fit, weights
from tests.support.modules.step_kinds import Kind

ROWS = {("x", "leaf"): Role.ROWS, ("y", "leaf"): Role.ROWS, ("lengths", "leaf"): Role.ROWS}


class Tagger(Kind):
    """Labels each place of its rows by a packed recurrent network."""

    def make_net(self):
        return nn.LSTM(3, 5, batch_first=True)

    def loss(self, batch):
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), ignore_index=-100)

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.loss(batch), batch_size=int(batch["lengths"].sum()))

    @staticmethod
    def collated(rows):
        x, y = zip(*rows, strict=True)
        return {
            "x": pad_sequence(x, batch_first=True),
            "y": pad_sequence(y, batch_first=True, padding_value=-100),
            "lengths": torch.tensor(list(map(len, x))),
        }

    @classmethod
    def loader(cls):
        generator, rows = torch.Generator().manual_seed(0), []
        for row in range(24):
            length = 3 + 5 * row % 9
            x = torch.randn(length, 3, generator=generator, dtype=torch.float64)
            rows.append((x, torch.randint(5, (length,), generator=generator)))
        return DataLoader(Rows(rows), batch_size=8, collate_fn=cls.collated)


class Masked(Tagger):
    """Takes the places of its rows by a mask as wide as the longest one."""

    def loss(self, batch):
        lengths = batch["lengths"]
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return F.cross_entropy(self.net(batch["x"])[0][mask], batch["y"][mask])


class ListsLengths(Masked):
    """Has its lengths in a list."""

    def loss(self, batch):
        return super().loss({**batch, "lengths": torch.tensor(batch["lengths"])})

    @staticmethod
    def collated(rows):
        batch = Tagger.collated(rows)
        return {**batch, "lengths": batch["lengths"].tolist()}


class FailsOnShortRows(Tagger):
    """Fails on rows without a long one, padded or not."""

    def loss(self, batch):
        if batch["lengths"].max() < 11:
            raise ValueError("no long row")
        return super().loss(batch)


class Predicts(Tagger):
    """Predicts each place of its rows, padded to the longest."""

    def predict_step(self, batch, batch_idx):
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.net(packed)[0], batch_first=True)[0]


class Pads(Predicts):
    """Says how its predictions are joined."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules(merge=MergeRules(outputs={"": joined} if stage == "predict" else {}))


def joined(values, rows):
    return pad_sequence([row for value in values for row in value], batch_first=True)


class MeanOfPlaces(Tagger):
    """Means over all places of the batch, so that its loss depends on the longest row."""

    def loss(self, batch):
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return ((out.sum(-1) - batch["y"].clamp(min=0)) ** 2).mean()


def trained(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    _, trainer = fit(module, kind.loader(), strategy=strategy, max_epochs=1)
    return module, trainer


@pytest.mark.parametrize("kind", [Tagger, Masked, ListsLengths])
def test_steps_that_go_by_lengths_train_as_whole(kind):
    (whole, _), strategy = trained(kind), UnifiedStrategy(micro_batch_size=3)
    split, _ = trained(kind, strategy)

    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-10, atol=1e-12)
    assert any("trimmed to their longest rows" in event for event in strategy.events)


def test_they_are_validated_as_whole():
    losses = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=3, evaluation_micro_batch_size=3)):
        module, trainer = trained(Tagger, strategy)
        losses.append(trainer.validate(module, Tagger.loader(), verbose=False)[0]["validated"])

    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def predicted(kind, strategy="auto"):
    module, trainer = trained(kind, strategy)
    return trainer.predict(module, kind.loader())


def test_a_refusal_of_padded_predictions_names_the_padding():
    with pytest.raises(SplitError, match=r"pads them to the longest .* a function"):
        predicted(Predicts, UnifiedStrategy(micro_batch_size=3, evaluation_micro_batch_size=3))


def test_padded_predictions_are_joined_by_a_function_that_pads():
    split = predicted(Pads, UnifiedStrategy(micro_batch_size=3, evaluation_micro_batch_size=3))

    torch.testing.assert_close(split, predicted(Predicts), rtol=1e-10, atol=1e-12)


def test_a_step_that_fails_on_trimmed_rows_too_is_refused():
    with pytest.raises(SplitError, match="fails on 2 of 8 rows"):
        trained(FailsOnShortRows, UnifiedStrategy(micro_batch_size=3))


def test_a_mean_over_padded_places_is_refused():
    with pytest.raises(SplitError, match=r"MeanOfPlaces"):
        trained(MeanOfPlaces, UnifiedStrategy(micro_batch_size=3))


def batch_of(lengths, *, padding=0.0):
    x = torch.full((len(lengths), max(lengths), 2), padding)
    for row, length in enumerate(lengths):
        x[row, :length] = 1.0 + torch.arange(length * 2.0).reshape(length, 2)
    return {"x": x, "y": torch.arange(12).reshape(4, 3), "lengths": torch.tensor(lengths)}


@pytest.mark.parametrize("padding", [0.0, -100.0, float("nan")])
def test_only_padding_is_trimmed(padding):
    batch = batch_of([2, 1, 3, 2], padding=padding)
    first = {name: value[:2] for name, value in batch.items()}
    found = trimmed(first, lengths_in(batch, ROWS), 0, 2, ROWS)

    assert {name: tuple(value.shape) for name, value in found.items()} == {"x": (2, 2, 2), "y": (2, 3), "lengths": (2,)}
    torch.testing.assert_close(found["x"], batch["x"][:2, :2], equal_nan=True)


def test_rows_with_the_longest_one_stay():
    batch = batch_of([2, 1, 3, 2])
    last = {name: value[2:] for name, value in batch.items()}

    assert trimmed(last, lengths_in(batch, ROWS), 2, 4, ROWS) is last


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [2, 0, 3, 2], [2, 1, 5, 2]])
def test_numbers_that_are_no_lengths_are_left_out(lengths):
    batch = {**batch_of([2, 1, 3, 2]), "lengths": torch.tensor(lengths)}

    assert lengths_in(batch, ROWS) == []
