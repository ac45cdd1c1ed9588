"""An encoder that mixes rows is refused before an update.

The error has its name and the difference.
"""

import copy

import pytest
import torch
from torch import nn

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import ConfigurationError, SplitError
from lightning_unified.step.encoders.calls import NotRowWiseError, merged
from tests.support.modules.contrastive import Contrastive, SimCLR, info_nce, is_as_plain, run
from tests.support.modules.plain import fit


class Linear(nn.Module):
    """What the encoders below begin with."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)


class Mixing(Linear):
    """Takes a share of the mean over the rows run at once."""

    def forward(self, x):
        out = self.inner(x)
        return out - 0.01 * out.mean(0)


class Pooled(Linear):
    def forward(self, x):
        return self.inner(x).mean(0, keepdim=True).square()


class Scalar(Linear):
    def forward(self, x):
        return self.inner(x).square().mean()


class MixedGradient(Linear):
    """Its outputs are by row; their gradients are not."""

    def forward(self, x):
        out = self.inner(x)
        return out + (out.mean(0) - out.mean(0).detach())


class Counter(Linear):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Remembers(Linear):
    def forward(self, x):
        self.last = self.inner(x)
        return self.last


class MovingMean(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        out = self.inner(x)
        self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean


class WritesItsInput(Linear):
    def forward(self, x):
        return self.inner(x.mul_(2))


WRONG = {
    "differ by": Mixing,
    "no first dimension of rows": Pooled,
    "no first dimension": Scalar,
    "gradient of": MixedGradient,
    "attribute 'calls'": Counter,
    "attribute 'last'": Remembers,
    "buffer 'mean'": MovingMean,
    "in place": WritesItsInput,
    "buffer '_u'": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_encoder_that_is_not_row_wise_is_refused_before_an_update(what):
    class Wrong(Contrastive):
        def __init__(self):
            super().__init__()
            self.net = WRONG[what]()

        def loss(self, batch):
            out = self.net(batch["x"])
            return info_nce(out, out.detach()) if out.dim() else out, out.reshape(1, -1)

    torch.manual_seed(0)
    module = Wrong().double()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(SplitError, match="'net'") as refusal:
        fit(module, Wrong.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
    assert what in str(refusal.value)
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


def test_batch_norm_inside_an_encoder_is_refused_and_outside_is_exact():
    class Inside(Contrastive):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    with pytest.raises(SplitError, match=r"BatchNorm in train mode \(net\.1"):
        run(Inside, UnifiedStrategy(micro_batch_size=3))
    run(Inside, UnifiedStrategy(micro_batch_size=3, batch_norm="micro"))
    is_as_plain(SimCLR, run(SimCLR, UnifiedStrategy(micro_batch_size=3)))


@pytest.mark.parametrize(("name", "near"), [("nte", "'net'"), ("net.33", "'net.3'"), ("", "'net'")])
def test_an_unknown_name_is_refused_with_the_nearest_ones(name, near):
    strategy = UnifiedStrategy(micro_batches=MicroBatchRules(encoders=(name,)))
    with pytest.raises(ConfigurationError, match=near):
        run(Contrastive, strategy)


def test_a_step_that_calls_no_encoder_is_refused():
    class Method(Contrastive):
        encoders = ("other",)

        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 2)

    with pytest.raises(SplitError, match="calls none of these submodules"):
        run(Method, UnifiedStrategy(micro_batch_size=3))


class SharedMask(Contrastive):
    """An argument of `positions` rows is shared by all rows of the batch."""

    positions = 4

    def __init__(self):
        super().__init__()
        self.net = Positions(self.positions)

    def loss(self, batch):
        mask = torch.ones(self.positions, self.positions, dtype=batch["x"].dtype).tril()
        embedded = self.net(batch["x"], mask)
        return info_nce(embedded, embedded.detach()), embedded


class Positions(nn.Module):
    def __init__(self, positions):
        super().__init__()
        self.inner, self.positions = nn.Linear(6, positions), positions

    def forward(self, x, mask):
        return (self.inner(x)[:, None] * mask.softmax(-1)).sum(-1)


def test_a_shared_argument_stays_whole_when_a_later_batch_is_as_long():
    is_as_plain(SharedMask, run(SharedMask, UnifiedStrategy(micro_batch_size=3)))  # the last batch has 4 rows


def test_a_shared_argument_as_long_as_the_first_batch_is_refused():
    class Ambiguous(SharedMask):
        positions = 8

    with pytest.raises((SplitError, RuntimeError)) as refusal:
        run(Ambiguous, UnifiedStrategy(micro_batch_size=3))
    assert "net" in str(refusal.value) + "".join(getattr(refusal.value, "__notes__", []))


def test_results_of_chunks_merge_only_if_they_are_rows():
    kept = object()
    rows = [torch.zeros(2, 3), torch.ones(1, 3)]
    assert merged([{"a": one, "b": (None, kept, 1)} for one in rows], [2, 1])["a"].shape == (3, 3)
    for parts in ([torch.zeros(()), torch.ones(())], [1, 2], [rows[:1], rows], [torch.zeros(3, 2), torch.zeros(3, 1)]):
        with pytest.raises(NotRowWiseError):
            merged(parts, [2, 1])
