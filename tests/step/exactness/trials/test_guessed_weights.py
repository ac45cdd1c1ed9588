"""Loss weights that no name suggests, and losses of micro-batches without terms."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses import candidates, guesses, guesses_of_whole_losses
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import EXACT, run

GENERATOR = torch.Generator().manual_seed(0)
ROWS = 48
X = torch.randn(ROWS, 6, generator=GENERATOR, dtype=torch.float64)
NUMBERS = torch.randint(1, 6, (ROWS,), generator=GENERATOR)
MASKS = (torch.arange(4) + torch.arange(ROWS)[:, None]) % 7 < (torch.arange(ROWS) % 5)[:, None]
CLASSES = torch.randint(0, 3, (ROWS,), generator=GENERATOR)
TARGETS = torch.randint(-1, 3, (ROWS, 4), generator=GENERATOR)
TOKENS = torch.randint(0, 4, (ROWS, 6), generator=GENERATOR)
TOKENS[torch.rand(ROWS, 6, generator=GENERATOR) < 0.4] = -100
NONE = TARGETS.clone().clamp(min=-1, max=1)
NONE[22:28] = -1  # a micro-batch of the second batch
BOXES = [torch.randn(number % 4, 4, generator=GENERATOR, dtype=torch.float64) for number in NUMBERS.tolist()]


class Tuple(Net):
    """Its batch is a tuple of inputs and whole numbers."""

    fields = (X, NUMBERS)

    @classmethod
    def loader(cls):
        return DataLoader(list(zip(*cls.fields, strict=True)), batch_size=16)

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])


class Lengths(Tuple):
    def loss(self, out, lengths):
        steps = torch.arange(out.shape[1]) < lengths[:, None]
        return (out.square() * steps).sum() / lengths.sum()


class Foreground(Tuple):
    fields = (X, TARGETS)

    def loss(self, out, targets):
        return ((out[:, :4] - 1).square() * (targets > 0)).sum() / (targets > 0).sum()


class WithoutAClass(Tuple):
    """Leaves out a label that is a class elsewhere."""

    fields = (X, CLASSES)

    def loss(self, out, classes):
        kept = classes != 2
        return F.binary_cross_entropy_with_logits(out[kept, 0], classes[kept].double())


class UpToAPlace(Tuple):
    """Has terms up to a place of each row, which is one too, as the time of an event."""

    fields = (X, NUMBERS.remainder(4))

    def loss(self, out, places):
        steps = torch.arange(out.shape[1]) <= places[:, None]
        return (out.square() * steps).sum() / steps.sum()


class RowsWithAnEntry(Tuple):
    """Leaves out rows whose mask is empty."""

    fields = (X, MASKS)

    def loss(self, out, masks):
        shares = (out.masked_fill(~masks, -1e4).softmax(1) * out).sum(1)
        return shares[masks.any(1)].mean()


class Boxes(Tuple):
    @staticmethod
    def loader():
        rows = [(x, {"boxes": boxes}) for x, boxes in zip(X, BOXES, strict=True)]
        return DataLoader(rows, batch_size=16, collate_fn=lambda rows: tuple(map(list, zip(*rows, strict=True))))

    def training_step(self, batch, batch_idx):
        out = self.net(torch.stack(batch[0]))
        errors = [(one[:4] - row["boxes"]).abs().sum() for one, row in zip(out, batch[1], strict=True)]
        return torch.stack(errors).sum() / sum(len(row["boxes"]) for row in batch[1])


class SeveralTokens(Tuple):
    """Predicts the next token and those after it, as Medusa's heads and DeepSeek's multi-token prediction do."""

    fields = (X, TOKENS)

    def loss(self, out, tokens):
        ahead = [out.roll(ahead, 1)[:, None].expand(-1, 6 - ahead, -1) for ahead in (1, 2, 4)]
        return sum(
            F.cross_entropy(one.flatten(0, 1), tokens[:, -one.shape[1] :].flatten()) / one.shape[1] for one in ahead
        )


class AllButTheLast(Tuple):
    """Scores each row's labels but the last, which has no next token."""

    fields = (X, TOKENS)

    def loss(self, out, tokens):
        return F.cross_entropy(out[:, None].expand(-1, 5, -1).flatten(0, 1), tokens[:, :-1].flatten())


class AllButTheLastBesideRows(AllButTheLast):
    def loss(self, out, tokens):
        return super().loss(out, tokens) + out.square().mean()


class AtLeastOne(Tuple):
    fields = (X, NONE)
    least = 1

    def loss(self, out, targets):
        return (out[:, :4] - targets).square().sum() / max(int((targets > 0).sum()), self.least)


class AtLeastThree(AtLeastOne):
    least = 3


class Penalized(Foreground):
    fields = (X, NONE)

    def loss(self, out, targets):
        errors = ((out[:, :4] - 1).square() * (targets > 0)).sum()
        return errors / max(int((targets > 0).sum()), 1) + self.net[0].weight.square().sum()


class Mixed(Lengths):
    def loss(self, out, lengths):
        return super().loss(out, lengths) + out.square().mean()


class Squares(Lengths):
    def loss(self, out, lengths):
        return out.square().sum() / lengths.square().sum()


class Easiest(Tuple):
    """Is a mean over the half of the rows with small losses."""

    def loss(self, out, numbers):
        losses = out.square().mean(1)
        return losses[losses <= losses.detach().median()].mean()


OF_TOKENS = [SeveralTokens, AllButTheLast, AllButTheLastBesideRows]


@first_cells(
    11, "kind", [Boxes, Mixed, AtLeastOne, Lengths, Foreground, WithoutAClass, UpToAPlace, RowsWithAnEntry, *OF_TOKENS]
)
def test_losses_over_counts_without_a_known_name_split_exactly(kind):
    whole, *_ = run(kind, "auto", max_epochs=1)
    split, *_ = run(kind, UnifiedStrategy(micro_batch_size=6), max_epochs=1)

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


@pytest.mark.parametrize("kind", [Squares, Easiest])
def test_other_losses_are_refused(kind):
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(kind, UnifiedStrategy(micro_batch_size=6))


def test_a_loss_of_rows_with_too_few_terms_is_refused():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(AtLeastThree, UnifiedStrategy(micro_batch_size=6))


def test_a_penalty_of_weights_is_no_loss_of_rows_without_terms():
    whole, *_ = run(Penalized, "auto", max_epochs=1)
    split, *_ = run(Penalized, UnifiedStrategy(micro_batch_size=6), max_epochs=1)

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


def test_guesses_are_no_candidates():
    batch = (X, NUMBERS, TARGETS, BOXES)
    names = [rule.name for rule in guesses(batch, ROWS)]

    assert names == ["total of '1'", "entries of '2' above 0", "lengths of '3'"]
    ahead = [rule.name for rule in guesses((X, TOKENS), ROWS)]
    shifted = [f"scored '1', shifted by {shift}" for shift in (2, 3, 4)]
    assert ahead == [*shifted, "scored '1' but the last", "entries of '1' above 0"]
    assert not {*names} & {rule.name for rule in candidates(batch, ROWS)}


def test_further_guesses_are_of_whole_losses_alone():
    names = [rule.name for rule in guesses_of_whole_losses((X, NUMBERS, TARGETS, BOXES), ROWS)]

    assert names == [
        "places up to '1'",
        *(f"entries of '1' {how} {value}" for value in range(1, 6) for how in ("other than", "that are")),
        *(f"entries of '2' that are {value}" for value in range(-1, 2)),
        "entries of '2' other than 2",
        "entries of '2' that are 2",
    ]
