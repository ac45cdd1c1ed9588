"""Labels that a loss ignores by a number of its own are found in its graph, and weight micro-batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from tests.support.lanes import first_cells
from tests.support.modules.plain import Rows, weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import found, run

KINDS, IGNORED, ROWS, TOKENS = 2048, 7, 48, 5  # `loss_chunk` serves 2,048 classes and more


class Tokens(Net):
    """Has a loss for each token, and ignores tokens of 7."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(KINDS, 8), nn.Tanh(), nn.Linear(8, KINDS))

    def loss(self, out, batch):
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), ignore_index=IGNORED)


def test_a_window_whose_batches_are_counted_by_two_rules_is_refused():
    strategy = split(window_mean="terms")
    with pytest.raises(SplitError, match=r"counted by rows, .* entries of 'y' other than 7 is their number"):
        run(Tokens, loader(first=1), strategy=strategy, accumulate_grad_batches=3)


class Shifted(Tokens):
    """Computes its labels, so that no entry of the batch is the label that is ignored."""

    def loss(self, out, batch):
        return super().loss(out, {"y": (batch["y"] + 1) % KINDS})


def loader(*, first, token=IGNORED):
    """Return three batches of tokens. The ignored one occurs once in each, from batch `first` on, in row 20."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(3 * ROWS):
        y = torch.randint(KINDS, (TOKENS,), generator=generator)
        y[y <= IGNORED] = 11
        if index % ROWS == 20 and index >= first * ROWS:
            y[2] = token
        rows.append({"x": torch.randint(KINDS, (TOKENS,), generator=generator), "y": y})
    return DataLoader(Rows(rows), batch_size=ROWS)


def split(**options):
    return UnifiedStrategy(micro_batch_size=16, recompute=False, predict=False, **options)


@first_cells(1, "first", [0, 1, 2])
def test_a_rare_ignored_label_counts_in_no_micro_batch(first):
    plain, _ = run(Tokens, loader(first=first), strategy="auto")
    trained, trainer = run(Tokens, loader(first=first), strategy=split())

    torch.testing.assert_close(weights(trained), weights(plain), rtol=1e-9, atol=1e-11)
    assert found(trainer).startswith("entries of 'y' other than 7: ")


@first_cells(1, "first", [0, 1, 2])
def test_a_rare_ignored_label_that_the_batch_does_not_show_is_refused(first, checks):
    with pytest.raises(SplitError, match="Shifted cannot be split exactly"):
        run(Shifted, loader(first=first, token=IGNORED - 1), strategy=split())

    assert checks.steps[-1] == first


class Chunked(Net):
    """Computes the loss in chunks of rows, of labels that the batch does not show."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(KINDS, 8), nn.Tanh())
        self.head = nn.Linear(8, KINDS)

    def loss(self, out, batch):
        labels = (batch["y"] + 1) % KINDS
        labels = labels.masked_fill(labels == IGNORED, -100)
        return linear_cross_entropy(out, weight=self.head.weight, bias=self.head.bias, labels=labels)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(KINDS, 8), nn.Linear(8, KINDS, bias=False)

    def forward(self, x):
        return self.lm_head(torch.tanh(self.embedding(x)))


class Lazy(Shifted):
    """Has logits that `loss_chunk` computes in chunks of rows."""

    def __init__(self):
        super().__init__()
        self.net = Decoder()


@first_cells(1, "kind", [Chunked, Lazy])
def test_ignored_labels_of_a_loss_in_chunks_are_seen(kind, checks):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, loader(first=1, token=IGNORED - 1), strategy=split(loss_chunk=16 if kind is Lazy else False))

    assert checks.steps[-1] == 1


class Later(Tokens):
    """Ignores the label from the second batch on."""

    def loss(self, out, batch):
        if self.trainer.global_step == 0:
            return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())
        return super().loss(out, batch) * 1.5


def test_a_batch_whose_weights_a_check_replaces_is_repeated():
    plain, _ = run(Later, loader(first=0), strategy="auto")
    trained, trainer = run(Later, loader(first=0), strategy=split())

    torch.testing.assert_close(weights(trained), weights(plain), rtol=1e-9, atol=1e-11)
    assert found(trainer).startswith("entries of 'y' other than 7: ")
