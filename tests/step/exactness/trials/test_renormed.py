"""Embeddings with `max_norm` write their weights in the forward pass."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit, weights
from tests.support.modules.undo import FAULTS, TEXT, Fails, Plain

WORDS = torch.arange(96).reshape(24, 4) % 60


class Words(Plain):
    """Predicts the last word from the others; the rows of most words are longer than `max_norm`."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(60, 6, max_norm=0.5), nn.Linear(6, 60, bias=False))
        if tied:
            self.net[1].weight = self.net[0].weight

    def training_step(self, batch, batch_idx):
        out = self.net[1](self.net[0](batch[0][:, :-1]).mean(1))
        return F.cross_entropy(Fails.apply(out), batch[0][:, -1])


class Bags(Words):
    def training_step(self, batch, batch_idx):
        means = F.embedding_bag(batch[0][:, :-1], self.net[0].weight, max_norm=0.5)
        return F.cross_entropy(Fails.apply(self.net[1](means)), batch[0][:, -1])


class ReadsLength(Words):
    """Scales its loss by the weights as they are before the forward pass scales them."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float(self.net[0].weight.detach().norm())


def train(make, strategy, at=(), **options):
    FAULTS.update(at=set(at), calls=0)
    torch.manual_seed(0)
    module = make().double()
    fit(module, DataLoader(TensorDataset(WORDS), batch_size=8), strategy=strategy, **options)
    return module


@first_cells(2, "make", [Words, Bags])
@first_cells(1, ("options", "at"), [({"micro_batch_size": 3}, ()), ({"predict": False}, (2,))])
def test_an_embedding_with_max_norm_trains_as_with_whole_batches(make, options, at):
    whole = train(make, "auto")
    split = train(make, UnifiedStrategy(**options), at)

    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "at"), [({"micro_batch_size": 3}, ()), ({"predict": False}, (2,))])
def test_tied_weights_of_an_embedding_with_max_norm_are_refused_by_name(options, at):
    with pytest.raises(SplitError, match=r"uses net\.0\.weight in an embedding with max_norm and elsewhere"):
        train(lambda: Words(tied=True), UnifiedStrategy(**options), at)


@pytest.mark.parametrize(("options", "at"), [({"micro_batch_size": 3}, ()), ({"predict": False}, (1,))])
def test_a_failed_attempt_and_a_check_leave_no_scaled_rows_behind(options, at):
    made = []
    with pytest.raises(SplitError, match="differs from that of their micro-batches"):
        train(lambda: made.append(ReadsLength()) or made[-1], UnifiedStrategy(**options), at)

    torch.manual_seed(0)
    assert torch.equal(weights(made[0]), weights(ReadsLength().double()))


class Normalizes(Words):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[1].weight.copy_(F.normalize(self.net[1].weight, dim=1))
        return super().training_step(batch, batch_idx)


def test_a_trained_parameter_that_a_failed_step_had_written_is_named(caplog):
    train(Normalizes, UnifiedStrategy(predict=False), (2,))

    assert TEXT in caplog.text
    assert "had written net.1.weight, a trained parameter" in caplog.text
    assert "net.0.weight" not in caplog.text
