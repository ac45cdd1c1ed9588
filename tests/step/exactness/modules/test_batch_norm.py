"""BatchNorm is refused where a step runs it with statistics of the batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.trials.run import Runner
from lightning_unified.step.exactness.verdict import BatchNormsThatMix
from tests.support.modules.plain import fit, weights
from tests.support.modules.split import Net

IN_TRAIN_MODE = r"has BatchNorm in train mode \(encoder\.1\)"


class Encoded(Net):
    """A net behind an encoder with BatchNorm, which Lightning puts into train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=self.tracks))
        self.done = [[]]  # a number would be a fact about the module

    tracks = True

    def training_step(self, batch, batch_idx):
        self.set_modes()
        return F.cross_entropy(self.net(self.encoder(batch["x"])), batch["y"])

    def set_modes(self):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.done[0].append(batch_idx)


class InStep(Encoded):
    def set_modes(self):
        self.encoder.eval()


class ByHook(Encoded):
    def on_train_batch_start(self, batch, batch_idx):
        self.encoder.eval()


class ByTrain(Encoded):
    def on_train_epoch_start(self):
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.encoder.eval()
        return self


class Unused(Encoded):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class Later(Encoded):
    """Trains the encoder's statistics from the second epoch on."""

    def set_modes(self):
        self.encoder.train(self.current_epoch > 0)


class LaterUnseen(Encoded):
    """The same from the third batch on, by a number that is no fact about the batch."""

    def set_modes(self):
        self.encoder.train(len(self.done[0]) > 1)


class ForFewRows(Encoded):
    """Runs the encoder in train mode for one row of the last micro-batch of batch 3."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        if (batch["x"][:, 0] > 1).any():
            self.encoder(batch["x"])
        return loss

    @staticmethod
    def loader(seed=0, dtype=torch.float64):
        loader = Net.loader(seed, dtype)
        for index, row in enumerate(loader.dataset.rows):
            row["x"][0] = 1.5 if index == 23 else row["x"][0].clamp(-1, 1)
        return loader


class Untracked(Encoded):
    """Has statistics of the batch in eval mode too."""

    tracks = False

    def set_modes(self):
        self.encoder.eval()


def trained(kind, strategy="auto", **options):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy, **options)
    return module


def refused(kind, **strategy):
    """Train until the refusal; return the module."""
    torch.manual_seed(0)
    module = kind().double()
    with pytest.raises(SplitError, match=IN_TRAIN_MODE):
        fit(module, kind.loader(), strategy=UnifiedStrategy(micro_batch_size=3, **strategy))
    return module


@pytest.mark.parametrize("kind", [InStep, ByHook, ByTrain, Unused])
def test_batch_norm_that_never_mixes_rows_is_no_obstacle(kind):
    plain, module = trained(kind), trained(kind, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)
    assert int(module.encoder[1].num_batches_tracked) == 0


@pytest.mark.parametrize("kind", [Encoded, Untracked])
def test_batch_norm_that_mixes_rows_is_refused_before_the_first_update(kind):
    assert refused(kind).done == [[]]


@pytest.mark.parametrize(("kind", "batches"), [(Later, 3), (LaterUnseen, 2), (ForFewRows, 2)])
def test_batch_norm_that_begins_to_mix_rows_is_refused_at_that_batch(kind, batches):
    module = refused(kind)

    assert len(module.done[0]) == batches
    assert int(module.encoder[1].num_batches_tracked) == 0


@pytest.mark.parametrize("kind", [InStep, Unused])
def test_without_checks_the_modes_before_the_step_decide(kind):
    assert refused(kind, check_split=False).done == [[]]
    assert refused(kind, micro_batches=MicroBatchRules(check=False)).done == [[]]


def test_a_window_by_terms_leaves_batch_norm_in_whole_batches_alone():
    plain = trained(Encoded, accumulate_grad_batches=1)
    module = trained(Encoded, UnifiedStrategy(window_mean="terms"))

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)
    assert int(module.encoder[1].num_batches_tracked) == int(plain.encoder[1].num_batches_tracked)


def test_layers_that_mix_are_noted_once_each():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval(), nn.InstanceNorm1d(2, track_running_stats=True))

    with BatchNormsThatMix(net) as norms:
        net(torch.randn(4, 2, 3))
        net(torch.randn(4, 2, 3))
    net[1].train()(torch.randn(4, 2, 3))

    assert norms.names == ["0"]
    assert norms.has_layers
    assert not any(layer._forward_pre_hooks for layer in net)


def test_where_no_check_has_memory_the_modes_before_the_step_decide(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Runner, "run", fails)

    assert refused(InStep).done == [[]]
