"""Fits of sharded ranks whose modules write weights, mark parameters or choose options of FSDP2."""

from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.errors import LightningUnifiedError
from tests.support.ranks.shard_faults import local_rank
from tests.support.ranks.sharded import Deep, trained

TWO_BATCHES = 12  # the second one is short


class Descends(Deep):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ClampsInStep(Descends):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.norm.weight.clamp_(0.9, 0.99)
        return super().training_step(batch, batch_idx)


class Halves(Descends):
    """Writes weights in hooks of the validation and between epochs."""

    def on_train_epoch_start(self):
        self.norm.weight.data.mul_(0.5)

    def on_validation_epoch_end(self):
        self.norm.bias.data.add_(0.25)


class Marks(Deep):
    """Decays the weights that it has not marked."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for block in self.blocks:
            block.second.weight._no_decay = True

    def configure_optimizers(self):
        marked = [one for one in self.parameters() if getattr(one, "_no_decay", False)]
        others = [one for one in self.parameters() if not getattr(one, "_no_decay", False)]
        groups = [{"params": marked, "weight_decay": 0.0}, {"params": others, "weight_decay": 2.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], 0.02)


class Options(Descends):
    """Shards itself with options of its own."""

    options: dict[str, Any] = {}

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh, **self.options)
            fully_shard(self, mesh=self.device_mesh, **self.options)


class KeepsGathered(Options):
    options = {"reshard_after_forward": False}


class Sums(Options):
    """Adds the gradients of the ranks up."""

    def configure_model(self):
        super().configure_model()
        for one in self.modules():
            if isinstance(one, FSDPModule):
                one.set_gradient_divide_factor(1.0)


class ReducesInBFloat16(Options):
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}


class ReadsBatch(Options):
    """Its policy casts what the root's forward gets; the step has a batch of numbers as they are."""

    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    read: torch.dtype | None = None

    def training_step(self, batch, batch_idx):
        ReadsBatch.read = batch["extra"].dtype
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "extra": torch.ones(len(batch["tokens"]))}


class Hooked(Deep):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm.weight.register_hook(lambda gradient: gradient * 0)


class HookedLater(Deep):
    def on_fit_start(self):
        self.norm.weight.register_hook(lambda gradient: gradient * 0)


class Sparse(Deep):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.other = nn.Embedding(3, 2, sparse=True)


class Penalized(Deep):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(one.square().sum() for one in self.parameters())


KINDS: dict[str, type[Deep]] = {kind.__name__: kind for kind in (ClampsInStep, Halves, Marks, Descends, Sums)}
KINDS |= {kind.__name__: kind for kind in (KeepsGathered, ReducesInBFloat16, ReadsBatch)}
REFUSED: dict[str, dict[str, Any]] = {
    "hook": {"kind": Hooked},
    "later hook": {"kind": HookedLater},
    "sparse": {"kind": Sparse},
    "average": {"kind": Deep, "callbacks": [EMAWeightAveraging(decay=0.5)]},
    "penalty": {"kind": Penalized},
    "write": {"kind": ClampsInStep},
}


def alone(name: str) -> dict[str, Any]:
    return trained("auto", ranks=1, rank=0, kind=KINDS[name], max_epochs=1, module={"rows": TWO_BATCHES})


def fits(hold: Any, *names: str) -> dict[str, dict[str, Any]]:
    """Return this rank's fits in micro-batches of three rows, by name."""
    return {name: _fit(hold, KINDS[name]) for name in names}


def _fit(hold: Any, kind: type[Deep], *callbacks: Any) -> dict[str, Any]:
    strategy = UnifiedFSDPStrategy(hold=hold, micro_batch_size=3, predict=False)
    settings: dict[str, Any] = {"max_epochs": 1, "module": {"rows": TWO_BATCHES}}
    fit = trained(strategy, *callbacks, ranks=2, rank=local_rank(), kind=kind, **settings)
    return {**fit, "read": ReadsBatch.read}


def refusals() -> dict[str, str]:
    """Return the errors of fits with shards."""
    found = {}
    for name, case in REFUSED.items():
        try:
            _fit("shards", case["kind"], *case.get("callbacks", ()))
            found[name] = "not refused"
        except LightningUnifiedError as error:
            found[name] = str(error)
    return found
