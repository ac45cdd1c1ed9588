"""Runs of the ranks in the distributed tests: faults on one rank, and results of each fit."""

import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_unified import RunCheckpoint, UnifiedDDPStrategy
from lightning_unified.step.ranks import reduction
from tests.support.lasting import Lasting
from tests.support.ranks.modules import TEXT, ManualNet, Net, OwnData, RaggedNet, Rows, Tokens, rank

MIB, GIB = 2**20, 2**30


class Fails(L.Callback):
    """Raises an out-of-memory error once, on one rank, in a phase of a batch.

    The error comes after the step has done some work.
    """

    left = Lasting()

    def __init__(self, phase: str, *, on: int = 1, batch: int = 2, times: int = 1) -> None:
        self.phase, self.on, self.batch, self.seen, self.left = phase, on, batch, -1, times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if rank() != self.on or self.seen != self.batch:
            return
        layer = module.net[-1]
        if self.phase == "forward":
            handle = layer.register_forward_hook(lambda *_: self._raise(handle))
        elif self.phase == "backward":
            handle = module.net[0].weight.register_hook(lambda *_: self._raise(handle))
        elif self.phase == "last backward":
            handle = layer.weight.register_hook(self._second(lambda: self._raise(handle)))
        elif self.phase == "reduction":
            self._in_reduction(trainer)
        elif self.phase == "optimizer step":
            self._in_step(trainer.optimizers[0])
        elif self.phase == "half written":
            self._half_written(trainer.optimizers[0])

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if self.phase == "validation" and rank() == self.on and self.left and not trainer.sanity_checking:
            handle = module.net[-1].register_forward_hook(lambda *_: self._raise(handle))

    def on_after_backward(self, trainer, module):
        if self.phase == "hook" and rank() == self.on and self.seen == self.batch and self.left:
            self._raise(None)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.phase == "clipping" and rank() == self.on and self.seen == self.batch and self.left:
            self._raise(None)

    @staticmethod
    def _second(then):
        """Return a hook that calls `then` the second time it is called."""
        calls = []

        def hook(_):
            calls.append(1)
            if len(calls) == 2:
                then()

        return hook

    def _in_reduction(self, trainer):
        copy = reduction._copy

        def failing(*args):
            if self.left:
                self._raise(None)
            copy(*args)

        reduction._copy = failing

    def _in_step(self, optimizer):
        create_state = optimizer._init_group

        def failing(*args, **kwargs):
            result = create_state(*args, **kwargs)
            if self.left:
                self._raise(None)
            return result

        optimizer._init_group = failing

    def _half_written(self, optimizer):
        def step(closure=None):
            if not self.left:
                return type(optimizer).step(optimizer, closure)
            if closure is not None:  # with a gradient scaler the gradients are there already
                closure()
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
            return self._raise(None)

        optimizer.step = step

    def _raise(self, handle):
        if handle is not None:
            handle.remove()
        self.left -= 1
        raise RuntimeError(TEXT)


class ShrinksAt(L.Callback):
    """The undisturbed twin of a failing fit.

    From the same batch on, all ranks use the smaller size.
    """

    def __init__(self, limit: int, *, batch: int = 2) -> None:
        self.limit, self.batch, self.seen = limit, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = self.limit


class Gradients(L.Callback):
    """Records the gradients that the optimizer sees."""

    def __init__(self) -> None:
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None]
        self.seen.append(torch.cat(gradients).clone())


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_unified"):
        logging.getLogger(name).setLevel(logging.ERROR)


def trainer_of(strategy: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    quiet()
    return L.Trainer(
        accelerator=options.pop("accelerator", "cpu"),
        devices=options.pop("devices", 2),
        strategy=strategy,
        precision=options.pop("precision", "64-true"),
        max_epochs=options.pop("max_epochs", 1),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(module: L.LightningModule, strategy: Any, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
    """Train from seed 10 + rank; return this rank's results."""
    recorder = Gradients()
    checkpoint, validates = options.pop("ckpt_path", None), options.pop("validates", False)
    trainer = trainer_of(strategy, recorder, *callbacks, **options)
    torch.manual_seed(10 + rank())
    trainer.fit(
        module,
        None if isinstance(module, OwnData) else DataLoader(Rows(64), batch_size=8),
        DataLoader(Rows(40), batch_size=8) if validates else None,
        ckpt_path=checkpoint,
        weights_only=False,
    )
    policy = getattr(trainer.strategy, "policy", None)
    return {
        "weights": torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()]),
        "buffers": [buffer.detach().cpu() for buffer in module.buffers()],
        "gradients": recorder.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seen": list(getattr(module, "seen", [])),
        "steps": trainer.global_step,
        **(
            {}
            if policy is None
            else {
                "recoveries": policy.recoveries,
                "events": policy.events,
                "sizes": policy.sizes.state_dict(),
                "largest": policy.sizing.micro_batch_size,
                "budget": policy.watch.budget,
            }
        ),
    }


def net(kind: type[Any] = Net, **kinds: bool) -> Any:
    torch.manual_seed(7)
    return kind(**kinds).double()


WINDOWS = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}


UNUSED = "ddp_find_unused_parameters_true"


SAME_AS_DDP = {
    "": {
        "ddp": lambda: fit(net(), "ddp", validates=True),
        "whole": lambda: fit(net(), "unified_ddp", validates=True),
        "split": lambda: fit(net(), UnifiedDDPStrategy(micro_batch_size=3), validates=True),
    },
    "windows": {
        "ddp": lambda: fit(net(norm=True), "ddp", **WINDOWS),
        "whole": lambda: fit(net(norm=True), "unified_ddp", **WINDOWS),
        "ddp, split": lambda: fit(net(), "ddp", **WINDOWS),
        "split": lambda: fit(net(), UnifiedDDPStrategy(micro_batch_size=3), **WINDOWS),
    },
    "unused": {
        "ddp": lambda: fit(net(unused=True), UNUSED),
        "whole": lambda: fit(net(unused=True), "unified_ddp"),
        "split": lambda: fit(net(unused=True), UnifiedDDPStrategy(micro_batch_size=3)),
    },
    "ragged": {
        "ddp": lambda: fit(net(RaggedNet), "ddp"),
        "whole": lambda: fit(net(RaggedNet), "unified_ddp"),
        "split": lambda: fit(net(RaggedNet), UnifiedDDPStrategy(micro_batch_size=2)),
    },
    "manual": {
        "ddp": lambda: fit(net(ManualNet), "ddp"),
        "whole": lambda: fit(net(ManualNet), "unified_ddp"),
    },
}


def same_as_ddp(kind: str) -> dict[str, dict[str, Any]]:
    """Return fits of `ddp` and of the unified strategy, whole and split, of one kind of SAME_AS_DDP."""
    return {name: run() for name, run in SAME_AS_DDP[kind].items()}


def unplanned(**options: Any) -> UnifiedDDPStrategy:
    """Return a strategy without a plan: it finds its micro-batch size by running."""
    return UnifiedDDPStrategy(predict=False, **options)


STEPS = ("forward", "backward", "reduction", "hook")


WEIGHTS = ("clipping", "optimizer step", "half written")


STEP = {"gradient_clip_val": 0.3, "validates": True}


def failing(phase: str) -> Callable[[], dict[str, Any]]:
    return lambda: fit(net(dropout=True), unplanned(), Fails(phase), **STEP)


def in_windows(event: L.Callback) -> dict[str, Any]:
    return fit(net(dropout=True), unplanned(), event, **STEP, accumulate_grad_batches=2)


RECOVERED = {
    **{phase: failing(phase) for phase in (*STEPS, *WEIGHTS, "validation")},
    "backward, windows": lambda: in_windows(Fails("backward", batch=3)),
    "reduction, windows": lambda: in_windows(Fails("reduction", batch=3)),
    "smaller, windows": lambda: in_windows(ShrinksAt(4, batch=3)),
    "first optimizer step": lambda: fit(net(dropout=True), unplanned(), Fails("optimizer step", batch=0, on=0), **STEP),
    "all optimizer steps": lambda: fit(
        net(dropout=True), unplanned(), *(Fails("optimizer step", on=rank) for rank in range(2)), **STEP
    ),
    "undisturbed": lambda: fit(net(dropout=True), unplanned(), **STEP),
    "smaller": lambda: fit(net(dropout=True), unplanned(), ShrinksAt(4), **STEP),
    "last backward": lambda: fit(
        net(), unplanned(micro_batch_size=4, check_split=False), Fails("last backward"), **STEP
    ),
    "smaller still": lambda: fit(net(), unplanned(micro_batch_size=4, check_split=False), ShrinksAt(2), **STEP),
}


def recovered(*names: str) -> dict[str, dict[str, Any]]:
    """Return fits of RECOVERED: one rank runs out of memory once, or an undisturbed twin of that."""
    return {name: RECOVERED[name]() for name in names}


class Presses(L.Callback):
    """Shrinks the size on all ranks as a guard does, then reports a failed size on one rank.

    The first request is that of a guard.
    """

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        if batch_idx == 0:
            self.pressed = strategy.shrink("a test")
            self.after = strategy.micro_batch_size
        if batch_idx == 1 and rank() == 1:
            strategy.policy.sizing.shrink("too much", has_failed=True)


def sizes() -> dict[str, Any]:
    """Return the results of a shrink on all ranks, and of a failed size on one rank only."""
    presses = Presses()
    return {**fit(net(), unplanned(), presses), "pressed": presses.pressed, "after": presses.after}


class Pickles(L.Callback):
    """Pickles the Trainer before each optimizer step, as spawned loader workers do."""

    def __init__(self) -> None:
        self.steps = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        copy = pickle.loads(pickle.dumps(trainer))
        self.steps.append(copy.global_step == trainer.global_step)


def pickled() -> list[bool]:
    callback = Pickles()
    fit(net(), unplanned(micro_batch_size=3), callback)
    return callback.steps


def windows_by_terms() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a two-batch window's gradient on two ranks, and the gradient of all rows together."""
    module = net(Tokens)
    module.loss(*Tokens.rows()).backward()
    together = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    strategy = UnifiedDDPStrategy(window_mean="terms", micro_batch_size=3)
    seen = fit(net(Tokens), strategy, accumulate_grad_batches=2, use_distributed_sampler=False)
    return seen["gradients"][0], together


def resumed(folder: str) -> dict[str, dict[str, Any]]:
    """Return a run with a failure, and the same run stopped in the middle and resumed."""

    def run(name: str, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
        own = RunCheckpoint(f"{folder}/{name}", every_n_steps=2, monitor=None)
        return fit(net(dropout=True), unplanned(), own, *callbacks, enable_checkpointing=True, **options)

    straight = run("straight", Fails("backward", batch=1), max_epochs=2)
    run("stopped", Fails("backward", batch=1))
    return {"straight": straight, "resumed": run("resumed", ckpt_path=f"{folder}/stopped/last.ckpt", max_epochs=2)}
