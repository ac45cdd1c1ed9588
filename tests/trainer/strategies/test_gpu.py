"""On a real CUDA device: a capped allocator raises, and the strategy recovers.

Every precision is covered. Run with `-m gpu`.
"""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import OutOfMemoryError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 2**20
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cuda",
    "devices": 1,
}


class Wide(L.LightningModule):
    """About 24 MiB of activations a row: 64 rows need 1.5 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def training_step(self, batch, batch_idx):
        hidden = self.lift(batch)
        for _ in range(3):
            hidden = torch.tanh(hidden)
        loss = (self.drop(hidden) - batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)

    def train_dataloader(self):
        rows = torch.randn(256, 768, 64, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=64)


@pytest.fixture(autouse=True)
def _no_cap_afterwards():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.cuda.empty_cache()


def test_plain_lightning_dies_under_the_same_cap():
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(600 * MIB / torch.cuda.get_device_properties(0).total_memory)
    with pytest.raises(torch.OutOfMemoryError):
        L.Trainer(max_steps=4, **QUIET).fit(Wide())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_budget_caps_the_allocator_and_the_run_continues_in_micro_batches(precision):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    strategy = UnifiedStrategy(budget=600 * MIB, predict=False)
    trainer = L.Trainer(strategy=strategy, max_steps=8, precision=precision, **QUIET)
    trainer.fit(Wide())

    assert strategy.cap.applied
    assert trainer.global_step == 8
    assert strategy.recoveries >= 1
    assert strategy.micro_batch_size < strategy.effective_batch_size == 64
    assert torch.cuda.max_memory_reserved() <= 600 * MIB
    assert torch.isfinite(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("own", [None, "False"])
def test_segments_expand_where_a_batch_does_not_fit(own, monkeypatch):
    """The predicted peak is the counted one either way."""
    if own is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{own}")
    torch.cuda.empty_cache()
    strategy = UnifiedStrategy(budget=1100 * MIB)
    trainer = L.Trainer(strategy=strategy, max_steps=4, **QUIET)
    trainer.fit(Wide())
    settings = torch.cuda.memory._snapshot()["allocator_settings"]

    assert settings["expandable_segments"] is (own is None)
    assert ("segments" in strategy.plan.reasons) is (own is None)
    assert strategy.recoveries == 0
    assert strategy.micro_batch_size < 64
    assert torch.cuda.max_memory_reserved() <= 1100 * MIB
    assert strategy.plan.predicted_peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)


class Deep(L.LightningModule):
    """Twelve layers whose gradients take memory that activations leave."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(1024, 512, 1024), batch_size=64)


class Addresses(L.Callback):
    """Notes where gradients lie after each batch, and how often the allocator has returned pages to the driver."""

    def __init__(self):
        self.gradients, self.retries = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.gradients.append([one.grad.data_ptr() for one in module.parameters() if one.dim() > 1])
        self.retries.append(torch.cuda.memory_stats()["num_alloc_retries"])


def test_gradients_keep_their_addresses_where_segments_expand():
    torch.cuda.empty_cache()
    strategy, noted = UnifiedStrategy(budget=1200 * MIB, check_split=False), Addresses()
    L.Trainer(strategy=strategy, max_steps=8, callbacks=[noted], **QUIET).fit(Deep())

    assert "segments" in strategy.plan.reasons
    assert strategy.recoveries == 0
    assert strategy.micro_batch_size < 64
    assert all(addresses == noted.gradients[0] for addresses in noted.gradients), "packed after the first batch"
    assert noted.retries[-1] == noted.retries[1]


def test_micro_batches_give_the_gradients_of_the_whole_on_a_gpu():
    losses = {}
    for size in (64, 24, 7):
        torch.manual_seed(0)
        module = Wide().double()
        trainer = L.Trainer(strategy=UnifiedStrategy(micro_batch_size=size), max_steps=4, precision="64-true", **QUIET)
        trainer.fit(module)
        losses[size] = torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()])

    torch.testing.assert_close(losses[24], losses[64], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(losses[7], losses[64], rtol=1e-9, atol=1e-11)


def test_auto_precision_on_this_device_is_bf16_where_it_is_native():
    trainer = L.Trainer(strategy=UnifiedStrategy(precision="auto"), max_steps=2, gradient_clip_val=1.0, **QUIET)
    trainer.fit(Wide())
    native = torch.cuda.get_device_capability() >= (8, 0)

    assert trainer.precision == ("bf16-mixed" if native else "32-true")


class Evaluates(Wide):
    """Validates with far larger batches than it trains with."""

    def validation_step(self, batch, batch_idx):
        hidden = torch.cat([self.lift(batch) for _ in range(4)], dim=-1)
        self.log("val", (hidden.mean(-1) - batch.mean(-1)).pow(2).mean())

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(128, 768, 64), batch_size=128)


def test_a_validation_that_does_not_fit_runs_in_micro_batches_on_a_gpu():
    torch.cuda.empty_cache()
    strategy = UnifiedStrategy(budget=600 * MIB, micro_batch_size=8)
    trainer = L.Trainer(strategy=strategy, max_steps=4, num_sanity_val_steps=0, **QUIET)
    trainer.fit(Evaluates())

    assert trainer.global_step == 4
    assert strategy.recoveries >= 1
    assert all("validation" in event for event in strategy.events if "out of memory" in event)
    assert torch.isfinite(trainer.callback_metrics["val"])


def test_logits_that_do_not_fit_are_named_by_the_allocators_own_figure():
    class Vocabulary(Wide):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 300_000)

        def training_step(self, batch, batch_idx):
            return self.head(batch).mean()

    torch.cuda.empty_cache()
    with pytest.raises(OutOfMemoryError, match="the logits of 1 row do"):
        L.Trainer(strategy=UnifiedStrategy(budget=600 * MIB, predict=False), max_steps=1, **QUIET).fit(Vocabulary())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.norm(self.linear(x)))


class KeywordBlocks(L.LightningModule):
    """Calls its blocks with keyword arguments only.

    Torch's own checkpoint does not look for a device there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = block(x=x)
        return x.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), batch_size=32
        )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_recomputed_blocks_draw_the_same_noise_and_count_batches_once(precision):
    def trained(recompute):
        L.seed_everything(1)
        module = KeywordBlocks()
        strategy = UnifiedStrategy(recompute=recompute)
        L.Trainer(strategy=strategy, precision=precision, max_epochs=1, deterministic=True, **QUIET).fit(module)
        return [*module.state_dict().values(), torch.cuda.get_rng_state()]

    assert all(torch.equal(one, other) for one, other in zip(trained(False), trained(True), strict=True))
