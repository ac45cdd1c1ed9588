"""Losses of chunks of logits, with the recorded operations replayed on each chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_unified.nn.cross_entropy.added_gradient import add_gradient
from lightning_unified.nn.cross_entropy.derived import Derived, without_saved_tensor_hooks
from lightning_unified.nn.cross_entropy.row_parts import parts
from lightning_unified.nn.lazy_logits.source import HeadCall, Step, trained_by
from lightning_unified.nn.linear_cross_entropy import mean_of_scored

__all__ = ["Loss", "replayed", "replayed_losses"]


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """The arguments of `torch.nn.functional.cross_entropy` beside logits and labels."""

    weight: Tensor | None
    ignore_index: int
    label_smoothing: float

    @property
    def is_plain(self) -> bool:
        """Whether the loss has neither class weights nor smoothed labels."""
        return self.weight is None and not self.label_smoothing

    def of_rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, in at least float32."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(
            wide,
            labels,
            weight=None if self.weight is None else self.weight.to(wide.dtype),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )

    def mean(self, total: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of losses: over the scored labels, or by their weights.

        `total` is the sum of the losses.
        """
        scored = labels != self.ignore_index
        count = scored.sum()
        terms = count if self.weight is None else (self.weight[labels.where(scored, 0)] * scored).sum()
        if self.label_smoothing:  # torch divides by 0 where no label is scored
            return total / terms.to(total.dtype)
        return mean_of_scored(total, terms=terms, is_empty=count == 0)


def replayed(steps: Sequence[Step], loss: Loss) -> Derived:
    """Return kernels of a chunk of logits that replay recorded operations."""

    def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
        for step in steps:
            logits = step(logits)
        return loss.of_rows(logits, labels)

    return Derived(of_rows)


def replayed_losses(call: HeadCall, steps: Sequence[Step], hidden: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return a loss for each row of `hidden` (N, D), for any head and any tensors in the steps."""
    trained = trained_by(call, steps)
    return _ReplayedLosses.apply(_Job(call, tuple(steps), loss), labels, hidden, *trained)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    call: HeadCall
    steps: tuple[Step, ...]
    loss: Loss

    def losses(self, hidden: Tensor, labels: Tensor, swaps: dict[int, Tensor]) -> Tensor:
        device = hidden.device.type
        logits = self.call(hidden, caches=False)
        with torch.autocast(device, enabled=False):
            for step in self.steps:
                logits = step(logits, swaps)
            return self.loss.of_rows(logits, labels)


class _ReplayedLosses(torch.autograd.Function):
    """A loss for each row; the backward pass replays each chunk."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        job, labels, hidden, *trained = args
        ctx.job, ctx.names = job, [id(one) for one in trained]
        ctx.save_for_backward(labels, hidden, *trained)
        losses = None
        for part in parts(labels, job.call.rows):
            found = job.losses(hidden[part], labels[part], {})
            losses = found.new_empty(len(labels)) if losses is None else losses
            losses[part] = found
        return job.losses(hidden, labels, {}) if losses is None else losses

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        job, (labels, hidden, *trained) = ctx.job, ctx.saved_tensors
        # other tensors of the same values, so that a user's hooks on the originals run once, on the whole gradient
        swaps = {name: one.detach().requires_grad_() for name, one in zip(ctx.names, trained, strict=True)}
        totals = {name: torch.zeros_like(one, dtype=_wide(one)) for name, one in swaps.items()}
        needs_hidden = ctx.needs_input_grad[2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        for part in parts(labels, job.call.rows):
            leaf = hidden[part].detach().requires_grad_(needs_hidden)
            with torch.enable_grad(), without_saved_tensor_hooks(), job.call.swapped(swaps):
                losses = job.losses(leaf, labels[part], swaps)
                wanted = [*([leaf] if needs_hidden else []), *swaps.values()]
                found = list(torch.autograd.grad(losses, wanted, grad_outputs[0][part], allow_unused=True))
            if grad_hidden is not None:
                gradient = found.pop(0)
                grad_hidden[part] = 0 if gradient is None else gradient
            for total, gradient in zip(totals.values(), found, strict=True):
                if gradient is not None:
                    total.add_(gradient)
            del losses, found
        return (
            None,
            None,
            grad_hidden,
            *(add_gradient(one, total.to(one.dtype)) for total, one in zip(totals.values(), trained, strict=True)),
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
