"""TorchScript, traced and exported submodules: fits equal plain Lightning's."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy, predict
from lightning_unified.errors import DryRunError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
ROWS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


class Net(L.LightningModule):
    """Regresses on the outputs of an inner module that is no plain one."""

    def __init__(self, inner):
        super().__init__()
        self.net, self.inner = nn.Linear(6, 6), inner()

    def forward(self, x):
        return self.inner(self.net(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Block(nn.Module):
    """A block that holds a scripted layer."""

    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(Layers())

    def forward(self, x):
        return torch.tanh(self.inner(x))


INNER = {
    "scripted": lambda: torch.jit.script(Layers()),
    "traced": lambda: torch.jit.trace(Layers(), ROWS[:4]),
    "symbolically traced": lambda: torch.fx.symbolic_trace(Layers()),
    "exported": lambda: torch.export.export(nn.Sequential(nn.Linear(6, 6), nn.GELU()), (ROWS[:4],)).module(),
    "in blocks": lambda: nn.Sequential(Block(), Block()),
    "function": lambda: Calls(torch.jit.script(_doubled)),
}


def _doubled(x):
    return torch.relu(x) * 2


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def fitted(inner, strategy):
    torch.manual_seed(0)
    module = Net(inner)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, **options)
    trainer.fit(module, DataLoader(TensorDataset(ROWS), batch_size=4))
    return module.state_dict()


@pytest.mark.parametrize("name", INNER)
def test_a_fit_equals_plain_lightnings(name):
    plain, unified = fitted(INNER[name], "auto"), fitted(INNER[name], "unified")

    assert plain and all(torch.equal(plain[key], unified[key]) for key in plain)


def test_scripted_layers_inside_checkpointed_blocks_keep_their_statistics():
    plain = fitted(INNER["in blocks"], "auto")
    recomputed = fitted(INNER["in blocks"], UnifiedStrategy(recompute=True))

    assert all(torch.allclose(plain[key], recomputed[key]) for key in plain)


def test_a_scripted_layer_trains_in_micro_batches():
    def linear():
        return torch.jit.script(nn.Linear(6, 6))

    plain, split = fitted(linear, "auto"), fitted(linear, UnifiedStrategy(micro_batch_size=2))

    assert all(torch.allclose(plain[key], split[key], atol=1e-6) for key in plain)


@pytest.mark.parametrize("name", ["scripted", "traced"])
def test_a_dry_run_names_the_torchscript_module(name):
    with pytest.raises(DryRunError, match=r"Net cannot be run without values .*Layers in it is a TorchScript module"):
        predict(Net(INNER[name]), (ROWS[:4],), device="cpu")
