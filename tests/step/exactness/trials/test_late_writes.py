"""Trained parameters that a step writes after their use are refused.

That holds wherever they are, and in the first batch in which the write does something.
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(48, 6, generator=GENERATOR).double()
DATA = TensorDataset(ROWS, ROWS[:, :3].argmax(1))


def in_place(scale):
    with torch.no_grad():
        scale.clamp_(-0.01, 0.01)


def through_data(scale):
    scale.data.clamp_(-0.01, 0.01)


class Scales(L.LightningModule):
    """Scales logits by a parameter that its step clamps."""

    def __init__(self, start, write, when):
        super().__init__()
        self.net, self.write, self.when = nn.Linear(6, 3), write, when
        self.scale = nn.Parameter(torch.tensor(start))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.when == "before":
            self.write(self.scale)
        loss = F.cross_entropy(self.scale.exp() * self.net(x), y)
        if self.when == "after":
            self.write(self.scale)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def train(strategy, start, write, when):
    torch.manual_seed(0)
    module = Scales(start, write, when).double()
    L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(DATA, batch_size=8))
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@pytest.mark.parametrize("write", [in_place, through_data])
@pytest.mark.parametrize("start", [0.5, 0.0], ids=["in every batch", "in a later batch"])
def test_a_parameter_of_the_module_itself_written_after_its_use_is_refused(start, write):
    with pytest.raises(SplitError, match="writes scale in its step, after its forward pass has used it"):
        train(UnifiedStrategy(micro_batch_size=3), start, write, "after")


@pytest.mark.parametrize("write", [in_place, through_data])
@pytest.mark.parametrize("start", [0.5, 0.0], ids=["in every batch", "in a later batch"])
def test_a_parameter_written_before_its_use_trains_as_in_a_whole_batch(start, write):
    split = train(UnifiedStrategy(micro_batch_size=3), start, write, "before")

    torch.testing.assert_close(split, train("auto", start, write, "before"), rtol=1e-9, atol=1e-12)
