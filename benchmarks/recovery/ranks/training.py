"""One rank's fit of a small module, with a fault in it."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.callbacks import GracefulInterrupt, RunCheckpoint
from lightning_unified.step.sharding import saving

__all__ = ["BATCHES", "FAULTS", "Case", "fit"]

STEPS, ROWS = 6, 8  # batches of an epoch, and rows of a batch over all ranks; the last batch is shorter
BATCHES = 2 * STEPS
TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
FAULTS = (
    "forward", "backward", "inside a block", "collective", "hook", "clipping", "optimizer", "half written", "validation",
    "save", "several", "SIGTERM", "SIGKILL",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run of the campaign.

    Attributes:
        index: With the campaign's seed, decides everything.
        fault: A name of `FAULTS`.
        ranks: Number of processes.
        hold: Argument of `UnifiedFSDPStrategy`.
        micro: The micro-batch size.
        window: Batches of an accumulation window.
        clip: The largest norm of gradients; None for no clipping.
        optimizer: A name of `_OPTIMIZERS`.
        victim: The rank that the fault strikes.
        batch: The batch in which it does, from 0.
        nth: The collective of a batch at which memory runs out.
    """

    index: int
    fault: str
    ranks: int
    hold: str
    micro: Any
    window: int
    clip: float | None
    optimizer: str
    victim: int
    batch: int
    nth: int


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, 0.02, foreach=True),
    "AdamW, for-loop": lambda parameters: torch.optim.AdamW(parameters, 0.02, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


class Fault(torch.autograd.Function):
    """The identity, which calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call()
        return gradients[0], None


class Block(nn.Module):
    """A block whose passes may be struck."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 12), nn.Linear(12, 7)
        self.strike: dict[str, Callable[[], None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, struck where `strike` says."""
        hidden = torch.tanh(self.first(x))
        if "inside a block" in self.strike:
            hidden = Fault.apply(hidden, self.strike["inside a block"])
        if "forward" in self.strike:
            self.strike["forward"]()
        out = x + self.second(hidden)
        return Fault.apply(out, self.strike["backward"]) if "backward" in self.strike else out


class Batches:
    """This rank's rows of each batch; a resumed epoch goes on behind the batches that are done."""

    def __init__(self, module: "Net") -> None:
        self._module = module

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        trainer, (rank, ranks) = self._module.trainer, self._module.part
        first = trainer.fit_loop.epoch_loop.batch_progress.current.processed if trainer.training else 0
        for number in range(first, STEPS):
            generator = torch.Generator().manual_seed(number)
            count = ROWS if number < STEPS - 1 else ROWS // 2
            tokens, labels = (torch.randint(11, (count, 5), generator=generator) for _ in range(2))
            yield tokens[rank::ranks], labels[rank::ranks]


class Net(L.LightningModule):
    """A decoder of two blocks with tied embeddings."""

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        super().__init__()
        self.case, self.part = case, (rank, ranks)
        self.embed, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(7)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over tokens."""
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the case's optimizer."""
        return _OPTIMIZERS[self.case.optimizer](self.parameters())

    def train_dataloader(self) -> Batches:
        """Return the batches."""
        return Batches(self)

    val_dataloader = train_dataloader


class Strikes(L.Callback):
    """Strikes one rank in one batch, or in several."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.seen, self.armed = case, folder, -1, False
        closing = dict.fromkeys(
            ("hook", "clipping", "optimizer", "half written"), case.window
        )  # only where a window ends
        self.times = (closing | {"several": 3, "save": 4}).get(case.fault, 1)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        case, due = self.case, range(self.case.batch, self.case.batch + self.times)
        pl_module.blocks[1].strike = {}
        self.armed = pl_module.part[0] == case.victim and self.seen in due
        if not self.armed:
            return
        fault = case.fault if case.fault != "several" else FAULTS[(case.nth + self.seen) % 5]
        if fault in ("forward", "backward", "inside a block"):
            pl_module.blocks[1].strike = {fault: self.fail}
        elif fault == "collective":
            self._in_collective(trainer.strategy)
        elif fault == "optimizer":
            _before(trainer.optimizers[0], "_init_group", self.fail)
        elif fault == "half written":
            self._in_update(trainer.optimizers[0])
        elif fault == "save":
            _before(saving._Writer, "write_data", self.fail)
        elif fault == "SIGTERM":
            self._path.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "SIGKILL":
            pl_module.blocks[case.nth % 2].strike = {("forward", "backward")[case.nth // 2 % 2]: self.kill}

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.case.fault == "validation" and pl_module.part[0] == self.case.victim and batch_idx == self.case.nth:
            self.armed = True
            pl_module.blocks[1].strike = {"forward": self.fail}

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.blocks[1].strike = {}

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.case.fault == "hook":
            self.fail()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.case.fault == "clipping":
            self.fail()

    def fail(self) -> None:
        """Run out of memory once: the file outlives an undone step, which restores this object."""
        if self.armed and not self._path.exists():
            self._path.touch()
            raise RuntimeError(TEXT)

    def kill(self) -> None:
        """End this process by a signal that nothing handles."""
        self._path.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _path(self) -> Path:
        return self.folder / f"struck-{self.seen}"

    def _in_collective(self, strategy: Any) -> None:
        collectives, calls = strategy._shards.collectives, []
        begin = collectives.begin

        def failing(kind: str, sent: Tensor) -> None:
            calls.append(kind)
            if len(calls) > self.case.nth % 4:  # a batch gathers whole parameters in at most four
                self.fail()
            begin(kind, sent)

        collectives.begin = failing

    def _in_update(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        def failing(closure: Callable[[], Any] | None = None) -> Any:
            if self._path.exists() or not self.armed:
                return step(closure)
            assert closure is not None
            closure()
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
            return self.fail()

        optimizer.step = failing  # type: ignore[method-assign]


def _before(owner: Any, name: str, fail: Callable[[], None]) -> None:
    call = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, call)
        fail()
        return call(*args, **kwargs)

    setattr(owner, name, failing)


def fit(case: Case, folder: Path, *, rank: int, ranks: int, strikes: bool) -> dict[str, Any]:
    """Return the whole weights, the steps and the events of a fit.

    It resumes from the last checkpoint if there is one.
    """
    torch.manual_seed(7)
    module = Net(case, rank, ranks).double()
    strategy: Any = "auto"
    if ranks > 1:
        strategy = UnifiedFSDPStrategy(hold=case.hold, micro_batch_size=case.micro)  # type: ignore[arg-type]
    last = folder / "last.ckpt"
    callbacks: list[Any] = [Strikes(case, folder)] if strikes else []
    if ranks > 1:
        callbacks += [RunCheckpoint(folder, every_n_steps=3, monitor=None), GracefulInterrupt()]
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true", max_epochs=2, callbacks=callbacks,
        accumulate_grad_batches=case.window, gradient_clip_val=case.clip, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, enable_checkpointing=ranks > 1, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=str(last) if last.exists() else None, weights_only=False)
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in module.parameters()]
    return {
        "weights": torch.cat([one.detach().flatten() for one in whole]),
        "steps": trainer.global_step,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "recoveries": getattr(getattr(trainer.strategy, "policy", None), "recoveries", 0),
    }
