"""The price of kept tokens, which controls the keep ratio, and detection of collapse."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["CollapseWatch", "KeepRate", "Price"]

_KINDS = (
    "keeps every token: nothing is compressed",
    "drops every token: nothing is left to read",
    "gives every token of a text the same chance: it tells none from another",
)


class Price(nn.Module):
    """The dual variable of the constraint "the expected keep ratio is `target`".

    Its unit is nats per kept token, and it is never negative. A proportional term damps the oscillations of the integral term.
    All state is in buffers, so that checkpoints hold it and a repeated step starts from the same state.

    Args:
        target: The share of tokens to keep.
        start: The first price.
        rate: Change of the integral term for an excess ratio of 1, in nats.
        damping: Proportional change of the price for an excess ratio of 1, in nats.

    Raises:
        ValueError: If the target is not in (0, 1), or another number is below 0.

    Source: Stooke, Achiam and Abbeel 2020, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods", algorithm 2.
    """

    value: Tensor
    integral: Tensor

    def __init__(self, *, target: float, start: float, rate: float, damping: float) -> None:
        super().__init__()
        if not 0 < target < 1:
            raise ValueError(f"keep_ratio={target} is not a share of tokens to keep; give one between 0 and 1.")
        if min(start, rate, damping) < 0:
            raise ValueError(f"price={start}, price_rate={rate}, price_damping={damping}: none may be below 0.")
        self.target, self.rate, self.damping = target, rate, damping
        self.register_buffer("value", torch.tensor(float(start)))
        self.register_buffer("integral", torch.tensor(float(start)))

    @torch.no_grad()
    def update(self, ratio: Tensor) -> None:
        """Move the price by the expected keep ratio (a scalar) of one whole batch."""
        excess = ratio.to(self.value.dtype) - self.target
        self.integral.add_(self.rate * excess).clamp_(min=0)
        self.value.copy_((self.integral + self.damping * excess).clamp(min=0))


class CollapseWatch(nn.Module):
    """Count the batches in a row that look collapsed, for each kind of collapse.

    Args:
        patience: Batches in a row that count as a collapse.
        margin: Distance of the expected keep ratio from 0 or 1 below which a batch looks collapsed.
        least_spread: Standard deviation of keep probabilities within texts below which a batch looks collapsed.

    Raises:
        ValueError: If the patience is not positive.
    """

    streaks: Tensor

    def __init__(self, *, patience: int, margin: float = 0.01, least_spread: float = 1e-3) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"collapse_patience={patience} is not a number of batches; give 1 or more.")
        self.patience, self.margin, self.least_spread = patience, margin, least_spread
        self.register_buffer("streaks", torch.zeros(len(_KINDS), dtype=torch.int64))

    @torch.no_grad()
    def update(self, *, ratio: Tensor, spread: Tensor) -> None:
        """Observe one batch's expected keep ratio and spread of keep probabilities.

        Both are scalars, and the spread is that in each text.
        """
        every, none = ratio > 1 - self.margin, ratio < self.margin
        looks = torch.stack([every, none, (spread < self.least_spread) & ~every & ~none])
        self.streaks.add_(1).mul_(looks)

    def found(self) -> list[str]:
        """Return descriptions of collapses that have lasted `patience` batches."""
        return [kind for kind, streak in zip(_KINDS, self.streaks.tolist(), strict=True) if streak >= self.patience]


class KeepRate(Callback):
    """Callback that updates a compressor's price after each batch, and warns once per collapse.

    It is a callback and no module hook, because Lightning calls checkpoint callbacks after all other callbacks but before the module's
    hooks: a checkpoint must hold the price of the next batch.

    Args:
        check_every: Batches between two checks for a collapse; a check waits for the device.
    """

    def __init__(self, *, check_every: int = 10) -> None:
        self.check_every = check_every
        self._said: set[str] = set()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(outputs, Mapping):
            return
        price, watch = pl_module.get_submodule("price"), pl_module.get_submodule("collapse")
        assert isinstance(price, Price)
        assert isinstance(watch, CollapseWatch)
        sums = torch.stack([outputs[name].detach().sum() for name in ("kept", "tokens", "spread", "texts")])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        kept, tokens, spread, texts = sums
        ratio, spread = kept / tokens.clamp(min=1), spread / texts.clamp(min=1)
        price.update(ratio)
        watch.update(ratio=ratio, spread=spread)
        pl_module.log_dict({"train/keep_ratio": ratio, "train/price": price.value, "train/spread": spread})
        if batch_idx % self.check_every == 0:
            self._report(watch, target=price.target, ratio=ratio)

    def _report(self, watch: CollapseWatch, *, target: float, ratio: Tensor) -> None:
        found = set(watch.found())
        for kind in sorted(found - self._said):
            rank_zero_warn(
                f"the policy has collapsed: for {watch.patience} batches or more it {kind} (expected keep ratio {float(ratio):.3f}, "
                f"target {target:.3f}). Raise entropy_weight, lower policy_learning_rate, or start at another price."
            )
        self._said = found
