"""GRPO's loss: clipped ratio times advantage, plus the divergence from the reference.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", eq. 7; Shao et al. 2024, "DeepSeekMath", eq. 3 and 4; Yu et
al. 2025, "DAPO", section 3.1 (two limits) and 3.3 (mean over tokens).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Objective", "Terms", "kl_to_reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Loss and figures of a micro-batch, as shares of the whole batch's values, which add up.

    Attributes:
        loss: 0-dim, with a gradient.
        kl: Mean estimated divergence from the reference per token; None without a reference.
        clipped: Share of tokens whose ratio is outside the limits, on the side without a gradient.
    """

    loss: Tensor
    kl: Tensor | None
    clipped: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """GRPO's loss, as a mean over all active tokens of an optimizer step.

    A token's term is `-min(r A, clip(r, 1 - low, 1 + high) A) + beta k3`.

    Attributes:
        clip_low: Distance of the ratio below 1 at which a negative advantage has no gradient.
        clip_high: Distance of the ratio above 1 at which a positive advantage has no gradient.
        beta: Weight of the divergence from the reference; 0 leaves the reference out.

    Raises:
        ValueError: If a limit or `beta` is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(
                f"clip_low={self.clip_low}; give more than 0 and at most 1, for a ratio cannot fall below 0."
            )
        if not self.clip_high > 0:
            raise ValueError(f"clip_high={self.clip_high} must be above 0.")
        if self.beta < 0:
            raise ValueError(f"beta={self.beta} may not be below 0.")

    def __call__(
        self,
        log_probs: Tensor,
        *,
        mask: Tensor,
        advantages: Tensor,
        total: float,
        old: Tensor,
        reference: Tensor | None = None,
    ) -> Terms:
        """Return the loss of some rows of a batch.

        Args:
            log_probs: (R, T) of the sampled tokens under the policy.
            mask: (R, T) bool, the active tokens.
            advantages: (R).
            total: Active tokens of the whole batch, which may have more rows.
            old: (R, T), `log_probs` at the time of sampling, without a gradient; equal to `log_probs` while the policy is unchanged.
            reference: (R, T), as `log_probs` under the reference; needed where `beta` is above 0.

        Raises:
            ValueError: If the reference is missing.
        """
        log_probs = log_probs.masked_fill(~mask, 0.0)  # pads have no weight, but an infinite ratio times 0 would be NaN
        ratio = (log_probs - old.masked_fill(~mask, 0.0)).exp()
        gain = advantages.to(log_probs.dtype).unsqueeze(1)
        within = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss, kl = -torch.minimum(ratio * gain, within * gain), None
        if self.beta:
            if reference is None:
                raise ValueError(f"beta={self.beta} needs the reference's log-probabilities.")
            kl = kl_to_reference(log_probs, reference.masked_fill(~mask, 0.0))
            loss = loss + self.beta * kl
        over = ((ratio > 1 + self.clip_high) & (gain > 0)) | ((ratio < 1 - self.clip_low) & (gain < 0))
        denominator = max(total, 1)
        return Terms(
            loss=(loss * mask).sum() / denominator,
            kl=None if kl is None else (kl.detach() * mask).sum() / denominator,
            clipped=(over & mask).sum() / denominator,
        )


def kl_to_reference(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return `exp(q) - q - 1` at `q = reference - log_probs`.

    It is an estimate of KL(policy, reference) that is never negative. Source: Schulman 2020, "Approximating KL
    Divergence" (the estimator called k3 there).
    """
    difference = reference - log_probs
    return difference.exp() - difference - 1
