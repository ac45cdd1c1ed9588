"""A short float16 run on the CPU with a live gradient scaler.

Torch scales on the CPU as it does on a GPU.
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import precision as stock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 24, 4


class Small(L.LightningModule):
    """A net whose gradients overflow float16 in chosen batches, at any scale.

    `spoilt` are the numbers of these batches, counted over the run. `found` are the gradients before the first batch.
    """

    def __init__(self, *, fused=False, spoilt=()):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.fused, self.spoilt, self.batches, self.found = fused, set(spoilt), 0, None

    def on_train_batch_start(self, *_):
        if self.found is None:
            self.found = [None if p.grad is None else p.grad.clone() for p in self.parameters()]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        return loss * (1e30 if self.batches in self.spoilt else 1.0)

    def on_train_batch_end(self, *_):
        self.batches += 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05, fused=self.fused)


class Scales(L.Callback):
    """Records the scale and its growth tracker after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        state = trainer.precision_plugin.state_dict()
        self.seen.append((state["scale"], state["_growth_tracker"]))


def loader():
    generator = torch.Generator().manual_seed(7)
    rows = TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator))
    return DataLoader(rows, batch_size=BATCH)


def live(scale=2.0**10, growth_interval=3):
    """Return the plugin that a user with a scaler of their own would give to the Trainer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return stock.MixedPrecision("16-mixed", "cpu", scaler=scaler)


def fit(module, *callbacks, strategy="unified", resume=None, epochs=2, **options):
    """Train on one device for `epochs` of six batches.

    The precision is 16-mixed with a live scaler unless a precision is given.
    """
    if "precision" not in options:
        options.setdefault("plugins", [live()])
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": epochs, **options},
    )
    trainer.fit(module, loader(), ckpt_path=resume)
    return trainer


def fresh(seed=3, **options):
    torch.manual_seed(seed)
    return Small(**options)


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def seen(trainer):
    """Return the devices and the dtype that run.

    The values are the module's device, autocast's device, autocast's dtype and a live scaler's device. The dtype is
    None where autocast is disabled.
    """
    plugin = trainer.precision_plugin
    context = plugin.autocast_context_manager()
    live = plugin.scaler is not None and plugin.scaler.is_enabled()
    return (
        trainer.strategy.root_device.type,
        plugin.device,
        context.fast_dtype if context._enabled else None,
        plugin.scaler._device if live else None,
    )
