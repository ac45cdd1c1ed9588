"""Runs of two ranks with a GPU each, for the tests of distributed training."""

import gc
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_unified import UnifiedDDPStrategy, UnifiedFSDPStrategy
from tests.support.ranks import modules as ddp_modules
from tests.support.ranks.failing_runs import Ends
from tests.support.ranks.modules import OwnData, rank
from tests.support.ranks.runs import Fails, fit, net, trainer_of

MIB = 2**20
CUDA = {"accelerator": "cuda"}


class Wide(OwnData, L.LightningModule):
    """A module with about 24 MiB of activations per row: 64 rows need 1.5 GiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lift, self.drop = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def training_step(self, batch, batch_idx):
        hidden = self.lift(batch)
        for _ in range(3):
            hidden = torch.tanh(hidden)
        loss = (self.drop(hidden) - batch).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)

    def train_dataloader(self):
        return DataLoader(torch.randn(1024, 768, 64, generator=torch.Generator().manual_seed(0)), batch_size=64)


class Heavy(OwnData, L.LightningModule):
    """A module with 256 MiB of weights and almost no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(16)])

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

    def train_dataloader(self):
        return DataLoader(torch.randn(64, 2048), batch_size=4)


class Queued(Heavy):
    """A module whose backward pass takes the device much longer than the host."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(torch.randn(32, 4096, 2048, generator=torch.Generator().manual_seed(0)), batch_size=2)


class Weights(L.Callback):
    """Keeps the weights of the end under a name, before a strategy takes them from the device."""

    def __init__(self, found: dict[str, Any], name: str) -> None:
        self._found, self._name = found, name

    def on_train_end(self, trainer, pl_module):
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in pl_module.parameters()]
        self._found[self._name] = torch.cat([one.detach().flatten().cpu() for one in whole])


def queued() -> dict[str, Any]:
    """Return the weights that each strategy trains while reductions run beside backward passes."""
    strategies = {
        "ddp": "ddp",
        "unified_ddp": "unified_ddp",
        "split": UnifiedDDPStrategy(micro_batch_size=1, check_split=False),
        "unified_fsdp": UnifiedFSDPStrategy(hold="parameters"),
    }
    found: dict[str, Any] = {}
    for name, strategy in strategies.items():
        torch.manual_seed(1)
        module = Queued()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        trainer_of(strategy, Weights(found, name), max_steps=8, max_epochs=-1, precision="32-true", **CUDA).fit(module)
        torch.cuda.empty_cache()
    return found


def same_as_ddp() -> dict[str, Any]:
    windows = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, **CUDA}
    return {
        "ddp": fit(net(norm=True), "ddp", **CUDA),
        "whole": fit(net(norm=True), "unified_ddp", **CUDA),
        "ddp, windows": fit(net(), "ddp", **windows),
        "split, windows": fit(net(), UnifiedDDPStrategy(micro_batch_size=3), **windows),
        "backend": torch.distributed.get_backend(),
    }


def one_rank_too_small(precision: str, predict: bool) -> dict[str, Any]:
    """Return a run in which both budgets suffice, and one in which the second is too small.

    Too small means that the second rank's budget does not hold its batch, and 1,200 MiB let its segments expand. With `predict`, the ranks plan parts before the first step; without
    it, the second rank runs out of memory.
    """
    options = {"max_steps": 8, "max_epochs": -1, "precision": precision, **CUDA}
    enough = fit(Wide(), UnifiedDDPStrategy(budget="60%"), **options)
    torch.cuda.empty_cache()
    short = (1200 if precision == "32-true" else 600) * MIB
    strategy = UnifiedDDPStrategy(budget=short if rank() else "60%", predict=predict)
    small = fit(Wide(), strategy, **options)
    start = torch.cat([parameter.detach().flatten().cpu() for parameter in Wide().parameters()])
    return {"start": start, "enough": enough, "small": small}


def step_fails(precision: str) -> dict[str, Any]:
    """Return fits in which the second rank's optimizer step runs out of memory once.

    In float16, the fits use a gradient scaler.
    """
    scales = []

    class Scales(L.Callback):
        def on_train_end(self, trainer, module):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scales.append(None if scaler is None else (scaler.get_scale(), scaler._get_growth_tracker()))

    def run(*callbacks):
        torch.manual_seed(7)
        return fit(ddp_modules.Net(), "unified_ddp", Scales(), *callbacks, precision=precision, **CUDA)

    ddp_modules.Rows.dtype = torch.float32
    failed = [run(Fails(phase)) for phase in ("optimizer step", "half written", "clipping")]
    return {"undisturbed": run(), "failed": failed, "scales": scales}


def peaks() -> dict[str, int]:
    """Return each strategy's peak of live tensors, for a module that is mostly weights."""
    found = {}
    for strategy in ("ddp", "unified_ddp"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer_of(strategy, max_steps=4, max_epochs=-1, precision="32-true", **CUDA).fit(Heavy())
        found[strategy] = torch.cuda.max_memory_allocated()
        gc.collect()
    return found


def dying() -> Any:
    return fit(net(), "unified_ddp", Ends(), **CUDA)
