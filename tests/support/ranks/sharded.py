"""Runs of `unified_fsdp` on several ranks, and the same training in one process."""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.errors import LightningUnifiedError
from lightning_unified.strategies import fsdp
from tests.support.lasting import Lasting
from tests.support.ranks.modules import TEXT
from tests.support.ranks.runs import quiet

ROWS = 44  # the last batch of eight rows is short


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(7, 16), nn.Linear(16, 7), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.second(torch.tanh(self.first(x))))


class Deep(L.LightningModule):
    """Three blocks, layers outside of them, a tied weight, and rows that do not divide by the number of ranks."""

    def __init__(
        self, *, ranks: int = 1, rank: int = 0, rows: int = ROWS, wide: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.part, self.rows = (rank, ranks), rows
        self.embed, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.seen: list[float] = []
        if wide:
            self.widen = nn.Sequential(nn.Linear(7, 20000), nn.Tanh(), nn.Linear(20000, 7))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "widen"):
            x = x + self.widen(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02, foreach=True)

    def _loader(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(11, (self.rows, 5), generator=generator)
        labels = torch.randint(11, (self.rows, 5), generator=generator)
        rank, ranks = self.part
        rows = [{"tokens": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]
        return DataLoader(rows[rank::ranks], batch_size=8 // ranks)

    def train_dataloader(self):
        return self._loader()

    def val_dataloader(self):
        return self._loader()

    def test_dataloader(self):
        return self._loader()


def trained(
    strategy: Any, *callbacks: L.Callback, ranks: int, rank: int, kind: type[Deep] = Deep, seed: int = 7, **options: Any
) -> dict[str, Any]:
    """Return whole weights and logged values after a fit on `ranks` ranks."""
    quiet()
    torch.manual_seed(seed)
    module = kind(ranks=ranks, rank=rank, **options.pop("module", {})).double()
    torch.manual_seed(20 + rank)
    checkpoint, tests = options.pop("ckpt_path", None), options.pop("tests", False)
    options = {"enable_checkpointing": False, "precision": "64-true", "max_epochs": 2, **options}
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint, weights_only=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    policy = getattr(trainer.strategy, "policy", None)
    largest = None if policy is None else policy.sizing.micro_batch_size
    if tests:
        metrics |= {name: float(value) for name, value in trainer.test(module, verbose=False)[0].items()}
    return {
        "weights": torch.cat([whole(parameter).flatten() for parameter in module.parameters()]),
        "metrics": metrics,
        "seen": module.seen,
        "steps": trainer.global_step,
        "recoveries": None if policy is None else policy.recoveries,
        "events": None if policy is None else policy.events,
        "largest": largest,
    }


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach().cpu()


def local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped windows": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "wide": {"module": {"wide": True}, "max_epochs": 1, "gradient_clip_val": 0.05},
}


def run(size: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(**arguments), ranks=size, rank=local_rank(), tests=True, **SETTINGS[name])


def alone(name: str, **options: Any) -> dict[str, Any]:
    return trained("auto", ranks=1, rank=0, tests=True, **SETTINGS[name], **options)


class Fails(L.Callback):
    """Raises an out-of-memory error on one rank, in a phase of a batch, after the step has done some work."""

    left = Lasting()

    def __init__(self, phase: str, *, on: int = 1, batch: int = 2, times: int = 1) -> None:
        self.phase, self.on, self.batch, self.seen, self.left = phase, on, batch, -1, times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if local_rank() != self.on or self.seen != self.batch:
            return
        last = module.blocks[-1]
        if self.phase == "forward":
            self._handle = last.register_forward_hook(lambda *_: self._fail())
        elif self.phase == "backward":
            self._handle = last.register_full_backward_hook(lambda *_: self._fail())
        elif self.phase == "gathering":
            self._before(torch, "empty")
        elif self.phase == "reduction":
            self._before(trainer.strategy._shards, "_take_rows")
        elif self.phase == "collective":
            self._in_collective(trainer.strategy._shards.collectives)
        elif self.phase == "optimizer step":
            self._before(trainer.optimizers[0], "_init_group")
        elif self.phase == "half written":
            self._before(torch, "_foreach_addcdiv_")
            self._before(torch, "_foreach_lerp_")

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if self.phase == "validation" and local_rank() == self.on and self.left and not trainer.sanity_checking:
            self._handle = module.blocks[-1].register_forward_hook(lambda *_: self._fail())

    def on_after_backward(self, trainer, module):
        self._fail_in("hook")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._fail_in("clipping")

    def _fail_in(self, phase: str) -> None:
        if self.phase == phase and local_rank() == self.on and self.seen == self.batch and self.left:
            self._fail()

    def _in_collective(self, collectives: Any) -> None:
        """Fail before the vote on the fifth collective: a gathering or a reduction whose buffers do not fit."""
        begin, calls = collectives.begin, []

        def failing(kind: str, sent: torch.Tensor) -> None:
            calls.append(kind)
            if len(calls) >= 5:
                self._fail()
            begin(kind, sent)

        collectives.begin = failing

    def _before(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def failing(*args, **kwargs):
            if self.left:
                self._fail()
            setattr(owner, name, call)
            return call(*args, **kwargs)

        setattr(owner, name, failing)

    def _fail(self) -> None:
        if not self.left:
            return
        self.left -= 1
        raise RuntimeError(TEXT)


class ShrinksAt(L.Callback):
    """The undisturbed twin of a fit that fails: from the same batch on, all ranks use the smaller size."""

    def __init__(self, limit: int, *, batch: int = 2) -> None:
        self.limit, self.batch, self.seen = limit, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = self.limit


STEP = {"gradient_clip_val": 0.05, "tests": True}


def recovered(
    size: int, *phases: str, hold: Any = "auto", rollback: bool = True, checks: bool = True
) -> dict[str, dict[str, Any]]:
    """Return fits in which the second rank runs out of memory once, and their undisturbed twins."""
    fits: dict[str, dict[str, Any]] = {}
    for phase in phases:
        event = {"undisturbed": [], "smaller": [ShrinksAt(2)]}.get(phase, [Fails(phase)])
        strategy = UnifiedFSDPStrategy(hold=hold, optimizer_rollback=rollback, check_split=checks)
        fits[phase] = trained(strategy, *event, ranks=size, rank=local_rank(), module={"drop": 0.3}, **STEP)
    return fits


class OwnSize(L.Callback):
    """Gives the first rank another micro-batch size than the second, which ranks that share sizes never have."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.sizes.max_micro_batch_size = (1, 3)[local_rank()]
        trainer.strategy.policy.compare = lambda words: None


def different_sizes() -> dict[str, Any]:
    settings = SETTINGS["clipped windows"]
    return trained(UnifiedFSDPStrategy(), OwnSize(), ranks=2, rank=local_rank(), tests=True, **settings)


class Manual(Deep):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False


class Quasi(Deep):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Partly(Deep):
    def configure_model(self):
        if not isinstance(self.blocks[0], FSDPModule):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh)


class ShardsItself(Deep):
    """Shards two blocks together."""

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            fully_shard(self.blocks[2], mesh=self.device_mesh)
            fully_shard(self, mesh=self.device_mesh)

    def on_train_start(self):
        assert not isinstance(self.blocks[0], FSDPModule)


def sharded_by_module() -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(), ranks=2, rank=local_rank(), kind=ShardsItself, tests=True)


def refusals() -> dict[str, str]:
    """Return the refusal of each module."""
    cases: dict[str, dict[str, Any]] = {
        "manual": {"kind": Manual},
        "16-mixed": {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        "LBFGS": {"kind": Quasi},
        "partly sharded": {"kind": Partly},
        "checked split": {"strategy": {"hold": "shards", "micro_batch_size": 2}},
    }
    return {name: _refusal(**options) for name, options in cases.items()}


def _refusal(*, strategy: dict[str, Any] | None = None, **options: Any) -> str:
    try:
        trained(UnifiedFSDPStrategy(**(strategy or {})), ranks=2, rank=local_rank(), **options)
    except (LightningUnifiedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def without_copies() -> Any:
    return recovered(2, "half written", rollback=False)


def recovered_shards(*phases: str) -> dict[str, dict[str, Any]]:
    return recovered(2, *phases, hold="shards", checks=False)


class Forks(Deep):
    """Leaves a block out on one rank."""

    def forward(self, tokens):
        if self.part[0] == 1 and self.trainer.global_step == 2:
            return self.head(self.norm(self.blocks[0](self.embed(tokens))))
        return super().forward(tokens)


def different_paths() -> Any:
    return trained(UnifiedFSDPStrategy(hold="shards"), ranks=2, rank=local_rank(), kind=Forks)


class Ends(L.Callback):
    """Ends one rank's process in the middle of a backward pass, without an error."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if local_rank() == 1 and batch_idx == 2:
            module.blocks[1].register_full_backward_hook(lambda *_: os._exit(7))


def dying(hold: Any) -> Any:
    return trained(UnifiedFSDPStrategy(hold=hold), Ends(), ranks=2, rank=local_rank())


def chosen() -> tuple[str, str]:
    """Return what ranks hold with a large budget, and with a small one on the second rank."""
    held = []
    for whole in (False, True):
        strategy = UnifiedFSDPStrategy()
        if whole and local_rank() == 1:
            fsdp.bytes_of_whole = lambda *_, **__: 2**62
        trained(strategy, ranks=2, rank=local_rank(), max_steps=1, max_epochs=-1)
        held.append(strategy.holds)
    return held[0], held[1]
