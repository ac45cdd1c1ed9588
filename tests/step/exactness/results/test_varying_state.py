"""State that differs between two equal runs, such as times, and state that only seems to."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.plain import fit
from tests.support.modules.writing import Writes


class SpreadOfDropout(Writes):
    """A standard deviation over rows, of features with dropout."""

    spread = 1.0

    def training_step(self, batch, batch_idx):
        out = F.dropout(self.net(batch["x"]), 0.2, self.training)
        self.spread = float(out.detach().std())
        return F.cross_entropy(out, batch["y"])


class SpreadOfLayer(SpreadOfDropout):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)

    def training_step(self, batch, batch_idx):
        out = self.net(self.drop(batch["x"]))
        self.spread = float(out.detach().std())
        return F.cross_entropy(out, batch["y"])


@pytest.mark.parametrize("kind", [SpreadOfDropout, SpreadOfLayer])
def test_state_that_differs_with_the_noise_only_is_refused(kind):
    torch.manual_seed(0)
    module = kind().double()

    with pytest.raises(SplitError, match=rf"writes {kind.__name__}\.spread in its step"):
        fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
