"""A step that makes a layer makes one for the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run


class Makes(Net):
    """Makes a layer in its step where there is none yet."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch_idx)(self.net(batch["x"])), batch["y"])


class InAttribute(Makes):
    def layer(self, batch_idx):
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(4, 4, dtype=torch.float64)
        return self.extra


class InList(Makes):
    def __init__(self):
        super().__init__()
        self.extra = []

    def layer(self, batch_idx):
        if not self.extra:
            self.extra.append(nn.Linear(4, 4, dtype=torch.float64))
        return self.extra[0]


@first_cells(1, "kind", [InList, InAttribute])
def test_a_layer_that_is_made_once_is_the_whole_batchs(kind):
    plain, _ = run(kind, batches(number=5), strategy="auto")
    module, _ = run(kind, batches(number=5))

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)


class InBatch(InAttribute):
    """Makes the layer in one batch, whether there is one or not."""

    def layer(self, batch_idx):
        if batch_idx == 3:
            self.extra = nn.Linear(4, 4, dtype=torch.float64)
        return getattr(self, "extra", nn.Identity())


def test_layers_that_each_micro_batch_makes_are_refused_before_their_update():
    with pytest.raises(SplitError, match=r"writes InBatch\.extra, a layer, and each micro-batch made one of its own"):
        run(InBatch, batches(number=5))
