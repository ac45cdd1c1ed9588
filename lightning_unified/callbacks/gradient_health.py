"""`GradientHealth`: detect NaN and Inf gradients; stop after too many bad steps in a row."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.callbacks.loops import logged_step
from lightning_unified.errors import GradientError, check_count

__all__ = ["GradientHealth"]

_COUNTS = ("nonfinite_steps", "nan_steps", "inf_steps")
_NAMED = 3  # parameters that a message names; it counts the others


class GradientHealth(Callback):
    """Count optimizer steps with NaN or Inf gradients; stop after too many bad steps in a row.

    Each step costs one pass over the gradients, as one multi-tensor operation where the backend has it. The pass computes one number per
    gradient, which is finite only if the whole gradient is finite. The numbers stay on the device. The callback reads them every
    `check_every` steps, at the end, and when a checkpoint is written; only then does the host wait. A row of bad steps is therefore found
    in full, wherever it began. A repetition of a step by recovery replaces its first attempt.

    A gradient scaler (`16-mixed`) skips bad steps and needs a few to find its scale, so its patience is larger. The callback warns about
    a scale below 1.

    It logs `gradients/nonfinite_steps` at each reading. For a bad step it also logs `gradients/nan_elements` and
    `gradients/inf_elements`.

    Args:
        patience: Bad steps in a row that end the run.
        scaler_patience: The same with a gradient scaler; its usual first scale, 2**16, is below 1 after 17 bad steps.
        check_every: Optimizer steps between two readings. With a divisor of `RunCheckpoint.every_n_steps`, a run ends before it
            writes a checkpoint of bad weights.

    Attributes:
        nonfinite_steps: Bad steps so far, as of the last reading.
        nan_steps: Those with a NaN.
        inf_steps: Those with an Inf; a step may have both.

    Raises:
        ConfigurationError: If an argument is less than 1.
    """

    def __init__(self, *, patience: int = 5, scaler_patience: int = 20, check_every: int = 50) -> None:
        for name, value in (("patience", patience), ("scaler_patience", scaler_patience), ("check_every", check_every)):
            check_count(f"GradientHealth: {name}", value)
        self.patience = patience
        self.scaler_patience = scaler_patience
        self.check_every = check_every
        self.nonfinite_steps = self.nan_steps = self.inf_steps = 0
        self._before = (0, 0, 0)  # the three counts of the resumed run
        self._watches: dict[int, _Watch] = {}
        self._warned_of_scale = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._before, self._watches, self._warned_of_scale = (0, 0, 0), {}, False

    @override
    def state_dict(self) -> dict[str, Any]:
        self._count()
        return {name: getattr(self, name) for name in _COUNTS}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = tuple(state_dict.get(name, 0) for name in _COUNTS)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        watch = self._watches.setdefault(id(optimizer), _Watch(self.check_every))
        step = trainer.global_step + 1  # counted like checkpoints: step_000050.ckpt is written after step 50
        watch.note(step, optimizer)
        if step % self.check_every == 0:
            self._read(trainer, pl_module, elements=watch.elements())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer, pl_module, elements=[])  # gradients are clipped by now, so their elements are not counted

    def _count(self) -> int:
        found = [self._before, *(watch.history().counts for watch in self._watches.values())]
        self.nonfinite_steps, self.nan_steps, self.inf_steps = map(sum, zip(*found, strict=True))
        return self.nonfinite_steps

    def _read(self, trainer: Trainer, module: LightningModule, *, elements: list["_Elements"]) -> None:
        metrics: dict[str, float] = {"gradients/nonfinite_steps": self._count()}
        histories = [watch.history() for watch in self._watches.values()]
        worst = max(histories, key=lambda history: history.longest.length, default=_History())
        if elements:
            metrics["gradients/nan_elements"] = sum(each.nan for each in elements)
            metrics["gradients/inf_elements"] = sum(each.inf for each in elements)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scales = scaler is not None and scaler.is_enabled()
        if scaler is not None and scales:
            self._look_at_scale(float(scaler.get_scale()))
        spoilt = worst.longest.length >= (self.scaler_patience if scales else self.patience)
        alike = getattr(
            trainer.strategy, "gradients_are_alike", False
        )  # ranks agree without a collective inside the step
        if spoilt if alike else trainer.strategy.reduce_boolean_decision(spoilt, all=False):
            raise GradientError(_message(worst.longest, elements, module=module, scales=scales))

    def _look_at_scale(self, scale: float) -> None:
        if scale < 1 and not self._warned_of_scale:
            self._warned_of_scale = True
            rank_zero_warn(
                f"the gradient scale has fallen to {scale:g}: gradients overflow float16 even unscaled. "
                "Use precision bf16-mixed or 32-true, or lower the learning rate."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Elements:
    """The numbers of NaN and Inf elements of a parameter's gradient."""

    parameter: Tensor
    nan: int
    inf: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Streak:
    """Bad steps in a row: their number, and their first and last step.

    It also holds the bad parameters of the first step, each with `"NaN"` or `"Inf"`.
    """

    length: int = 0
    first: int = 0
    last: int = 0
    parameters: tuple[tuple[Tensor, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _History:
    counts: tuple[int, int, int] = (0, 0, 0)  # steps with NaN or Inf, with NaN, with Inf
    current: _Streak = _Streak()
    longest: _Streak = _Streak()

    def followed_by(self, step: int, bad: tuple[tuple[Tensor, str], ...]) -> "_History":
        """Return the history with one more step, whose bad parameters are `bad`."""
        if not bad:
            return _History(counts=self.counts, longest=self.longest)
        length = self.current.length + 1
        first, parameters = (step, bad) if length == 1 else (self.current.first, self.current.parameters)
        current = _Streak(length=length, first=first, last=step, parameters=parameters)
        longest = current if length > self.longest.length else self.longest
        steps, nan, inf = self.counts
        kinds = {kind for _, kind in bad}
        counts = (steps + 1, nan + ("NaN" in kinds), inf + ("Inf" in kinds))
        return _History(counts=counts, current=current, longest=longest)


class _Watch:
    """The per-gradient numbers ("witnesses") of one optimizer's last steps.

    They stay on the device until they are read.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._read = _History()
        self._steps: list[int] = []
        self._rows: list[tuple[list[Tensor], Tensor]] = []

    @torch.no_grad()
    def note(self, step: int, optimizer: Optimizer) -> None:
        """Keep the witnesses of `step`; a second call for the same step replaces the first."""
        pairs = [(p, _dense(gradient)) for p in _parameters(optimizer) if (gradient := p.grad) is not None]
        pairs = [(p, gradient) for p, gradient in pairs if gradient.numel()]
        row = ([p for p, _ in pairs], _witnesses([gradient for _, gradient in pairs]))
        if self._steps and self._steps[-1] == step:
            self._rows[-1] = row
            return
        if len(self._steps) > self._capacity:
            self.history()
        self._steps.append(step)
        self._rows.append(row)

    def history(self) -> _History:
        """Return the history up to now; this waits for the device."""
        if not self._steps:
            return self._read
        rows = [witnesses for _, witnesses in self._rows if len(witnesses)]
        values = torch.cat(rows).tolist() if rows else []
        history, start = self._read, 0
        for step, (parameters, _) in zip(self._steps, self._rows, strict=True):
            self._read = history  # the last step stays open, because recovery may repeat it
            own = values[start : start + len(parameters)]
            start += len(parameters)
            bad = tuple(
                (p, "NaN" if math.isnan(v) else "Inf")
                for p, v in zip(parameters, own, strict=True)
                if not math.isfinite(v)
            )
            history = history.followed_by(step, bad)
        self._steps, self._rows = self._steps[-1:], self._rows[-1:]
        return history

    def elements(self) -> list[_Elements]:
        """Return the counts of the last step's bad gradients.

        Call it before they are clipped or zeroed.
        """
        streak = self.history().current
        if not self._steps or streak.last != self._steps[-1] or not streak.length:
            return []
        gradients = [(p, _dense(p.grad)) for p in self._rows[-1][0] if p.grad is not None]
        counts = (_Elements(parameter=p, nan=int(g.isnan().sum()), inf=int(g.isinf().sum())) for p, g in gradients)
        return [each for each in counts if each.nan or each.inf]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _dense(gradient: Tensor) -> Tensor:
    """Return this rank's part of `gradient` as a dense tensor.

    For a sparse gradient, these are its stored values.
    """
    if type(gradient) is not Tensor:
        to_local = getattr(gradient, "to_local", None)  # a DTensor's
        gradient = gradient if to_local is None else to_local()
    return gradient._values() if gradient.is_sparse else gradient


def _witnesses(gradients: list[Tensor]) -> Tensor:
    """Return one number per gradient, shape (number of gradients,).

    It is NaN or Inf if the gradient holds one, else finite.
    """
    if not gradients:
        return torch.empty(0)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        kinds.setdefault((gradient.device, gradient.dtype), []).append(index)
    if len(kinds) == 1:
        return _of_one_kind(gradients)
    numbers: list[Tensor] = [torch.empty(0)] * len(gradients)
    for chosen in kinds.values():
        for index, number in zip(chosen, _of_one_kind([gradients[index] for index in chosen]).unbind(), strict=True):
            numbers[index] = number
    device = numbers[0].device
    return torch.stack([one if one.device == device else one.to(device, non_blocking=True) for one in numbers])


def _of_one_kind(gradients: list[Tensor]) -> Tensor:
    """Return the numbers of gradients of one dtype on one device."""
    on_cpu = gradients[0].device.type == "cpu" and not gradients[0].dtype.is_complex
    return _sums(gradients) if on_cpu else _norms(gradients)


def _norms(gradients: list[Tensor]) -> Tensor:
    """Return the largest magnitudes without waiting.

    A 2-norm of finite float32 numbers may itself overflow.
    """
    half = gradients[0].dtype in {torch.float16, torch.bfloat16}
    return torch.stack(torch._foreach_norm(gradients, math.inf, torch.float32 if half else None))  # pyright: ignore[reportPrivateImportUsage]


def _sums(gradients: list[Tensor]) -> Tensor:
    """Return the sums, which show every NaN and Inf.

    On a CPU torch 2.13 vectorises sums, and does not vectorise the infinity norm. Where one is not finite, which costs
    nothing to look at there, the extremes tell which of the two the gradient holds, or that only the sum overflows.
    """
    sums = [gradient.sum() for gradient in gradients]
    finite = torch.stack(sums).isfinite().tolist()
    return torch.stack([one if ok else _extreme(g) for one, ok, g in zip(sums, finite, gradients, strict=True)])


def _extreme(gradient: Tensor) -> Tensor:
    """Return the largest magnitude of a gradient, NaN if it holds NaN."""
    least, greatest = torch.aminmax(gradient)
    return torch.maximum(greatest, -least)


def _message(streak: _Streak, elements: list[_Elements], *, module: LightningModule, scales: bool) -> str:
    if not streak.length:
        return "gradients were not finite for too long on another process; its message names the parameters."
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    first = [f"{names.get(id(p), 'an unnamed parameter')} ({kind})" for p, kind in streak.parameters]
    rest = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    now = [
        f"{names.get(id(each.parameter), '?')} {each.nan} NaN and {each.inf} Inf of {each.parameter.numel()} elements"
        for each in elements[:_NAMED]
    ]
    skipped = "; the gradient scaler skipped these steps" if scales else "; the weights were updated with them"
    return (
        f"gradients were not finite in {streak.length} optimizer steps in a row, {streak.first} to {streak.last}{skipped}. "
        f"At step {streak.first} first in: {', '.join(first[:_NAMED])}{rest}. "
        + (f"Now: {'; '.join(now)}. " if now else "")
        + "Inspect the loss and the batch of that step; lower the learning rate, set trainer.gradient_clip_val, "
        + ("or use precision bf16-mixed or 32-true; " if scales else "or use precision 32-true; ")
        + f"then resume from a checkpoint written before step {streak.first}."
    )
