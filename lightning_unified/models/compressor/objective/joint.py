"""Joint loss of policy and reader, with random numbers and totals fixed for the whole batch.

Letters for shapes: B texts, K masks of a text, T tokens, U tokens of a continuation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_unified.models.choices import check_numbers
from lightning_unified.models.compressor.network.codec import Codec, keep_top
from lightning_unified.models.compressor.objective import estimators as objectives
from lightning_unified.models.compressor.objective.relaxed_bernoulli import hard_bernoulli, relaxed_bernoulli

__all__ = ["JointLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JointLoss:
    """Objective and estimator; fields are the arguments of `Compressor` of the same names.

    Raises:
        ValueError: If a number is out of range.
    """

    objective: str
    target: str
    masks: int
    temperature: float
    entropy_weight: float
    budget_range: float
    kept_weight: float
    language_weight: float

    def __post_init__(self) -> None:
        least = 2 if self.objective == "reinforce" else 1
        if self.masks < least:
            why = ": the others of a text are each one's baseline" if least > 1 else ""
            raise ValueError(f"masks={self.masks}; objective={self.objective} needs at least {least}{why}.")
        weights = ("entropy_weight", "budget_range", "kept_weight", "language_weight")
        check_numbers(
            positive={"temperature": self.temperature}, not_negative={name: getattr(self, name) for name in weights}
        )

    @property
    def soft_masks(self) -> int:
        """Number of relaxed masks of a text, the larger half; the others are hard, as in use.

        A gate slightly above 0 shows the reader the dropped token, so a reader trained only on such gates restores little.
        """
        return -(-self.masks // 2) if self.objective == "relaxed" else 0

    def prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole batch with random numbers for each row, and totals.

        It adds `noise` (B, K, T), one uniform number for each decision; `shifts` (B) of the texts' log-odds, so that policy and reader
        see budgets on both sides of the target; `starts` (B), where the language-model part of each text begins, 0 for half of them;
        and the scalars `total_texts`, `total_tokens`, `total_scored`, `total_language`.

        Raises:
            ValueError: If the batch lacks the target's fields.
        """
        mask = batch["mask"]
        if self.target == "predict" and "continuation" not in batch:
            raise ValueError(
                "target=predict scores the continuation of each text, and the batch has none; set data.continuation_length above 0."
            )
        B, T = mask.shape
        lengths = mask.sum(1)
        starts = ((2 * torch.rand(B, device=mask.device) - 1).clamp(min=0) * lengths).long()
        return {
            **batch,
            "noise": torch.rand(B, self.masks, T, device=mask.device),
            "shifts": (2 * torch.rand(B, device=mask.device) - 1) * self.budget_range,
            "starts": starts,
            "total_texts": mask.any(1).sum(),
            "total_tokens": lengths.sum(),
            "total_scored": batch["continuation_mask"].sum() if self.target == "predict" else lengths.sum(),
            "total_language": (lengths - starts).sum(),
        }

    def terms(self, codec: Codec, batch: Mapping[str, Tensor], *, price: Tensor) -> dict[str, Tensor]:
        """Return the loss of some rows of a prepared batch, and figures of each row.

        Returns:
            Scalars that add up over micro-batches: `loss`, `distortion` and `language` (nats per scored token). Figures of each row (B):
            `kept` (expected), `tokens`, `spread` (standard deviation of its keep probabilities) and `texts` (1, or 0 for pads).
        """
        embeddings = codec.reader.embed(batch["input_ids"])
        logits = codec.keep_logits(embeddings, batch["mask"])
        parts = self.parts(codec, batch, embeddings=embeddings, logits=logits, price=price)
        loss = parts["distortion"] + parts["policy"] + self.language_weight * parts["language"]
        scalars = {name: parts[name].detach() for name in ("distortion", "language")}
        return {"loss": loss, **scalars, **_rows(logits, batch["mask"])}

    def parts(
        self, codec: Codec, batch: Mapping[str, Tensor], *, embeddings: Tensor, logits: Tensor, price: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss's terms with a gradient: `distortion`, `policy` and `language` (scalars).

        Args:
            codec: The networks.
            batch: Rows of a prepared batch.
            embeddings: (B, T, D), of its tokens.
            logits: (B, T), the policy's.
            price: Of a kept token, in nats.
        """
        ids, mask, noise = batch["input_ids"], batch["mask"], batch["noise"]
        moved = logits + batch["shifts"].to(logits.dtype).unsqueeze(1)
        keep = hard_bernoulli(moved.unsqueeze(1), uniform=noise)
        gates = keep
        if self.objective == "relaxed":
            soft = self.soft_masks
            gates = relaxed_bernoulli(moved.unsqueeze(1), uniform=noise[:, :soft], temperature=self.temperature)
            gates = torch.cat([gates, keep[:, soft:].to(gates.dtype)], dim=1)
        costs, scored = self._costs(codec, batch, embeddings=embeddings, gates=gates)
        # the price applies to the ratio at unshifted log-odds, which it controls
        policy = self._rate(batch, logits=logits, price=price)
        if self.objective == "reinforce":  # otherwise the gradient of the costs reaches the policy through the gates
            policy = policy + self._reinforce(batch, logits=moved, keep=keep, costs=costs, scored=scored)
        # every parameter takes part in every step, since DDP waits for each gradient
        policy = policy + 0 * (codec.separator.sum() + codec.mask_embedding.sum())
        language = torch.zeros((), device=ids.device)
        if self.language_weight:
            language = codec.language_loss(
                ids, embeddings=embeddings, keep=keep[:, 0], mask=mask, starts=batch["starts"]
            )
        return {
            "distortion": costs.mean(1).sum() / batch["total_scored"].clamp(min=1),
            "policy": policy,
            "language": language / batch["total_language"].clamp(min=1),
        }

    @torch.no_grad()
    def validate(self, codec: Codec, batch: Mapping[str, Tensor], *, ratio: float) -> Tensor:
        """Return a batch's sums (6): loss, its terms, language loss, its terms, kept tokens, tokens.

        The loss covers dropped tokens only, or the continuation, at exactly the share `ratio` kept. Tokens with a probability above
        1/2 count as kept.
        """
        ids, mask = batch["input_ids"], batch["mask"]
        embeddings = codec.reader.embed(ids)
        logits = codec.keep_logits(embeddings, mask)
        keep = keep_top(logits, mask=mask, ratio=ratio)
        if self.target == "predict":
            costs, terms = self._costs(codec, batch, embeddings=embeddings, gates=keep.unsqueeze(1))
        else:
            gates = keep.unsqueeze(1).to(embeddings.dtype)
            costs = codec.restoring_losses(ids, embeddings=embeddings, gates=gates, mask=mask) * ~keep.unsqueeze(1)
            terms = mask & ~keep
        starts = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        language = codec.language_loss(ids, embeddings=embeddings, keep=keep, mask=mask, starts=starts)
        tokens = mask.sum()
        values = (costs.sum(), terms.sum(), language, tokens, ((logits > 0) & mask).sum(), tokens)
        return torch.stack([value.float() for value in values])

    def _costs(
        self, codec: Codec, batch: Mapping[str, Tensor], *, embeddings: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the cost of each mask (B, K) in nats, and the scored tokens of each text (B)."""
        ids, mask = batch["input_ids"], batch["mask"]
        if self.target == "predict":
            follow, follow_mask = batch["continuation"], batch["continuation_mask"]
            losses = codec.continuing_losses(
                embeddings=embeddings, gates=gates, mask=mask, continuation=follow, continuation_mask=follow_mask
            )
            return losses.sum(-1), follow_mask.sum(1)
        soft = gates.to(embeddings.dtype)
        losses = codec.restoring_losses(ids, embeddings=embeddings, gates=soft, mask=mask)
        return (losses * (1 - (1 - self.kept_weight) * soft)).sum(-1), mask.sum(1)

    def _rate(self, batch: Mapping[str, Tensor], *, logits: Tensor, price: Tensor) -> Tensor:
        mask = batch["mask"]
        rate = objectives.rate_terms(logits, mask=mask, price=price, entropy_weight=self.entropy_weight)
        if self.objective == "relaxed":
            # the policy gets the soft masks' share of the distortion, so its price has the same share
            return rate.sum() / batch["total_tokens"].clamp(min=1) * (self.soft_masks / self.masks)
        return (rate / mask.sum(1).clamp(min=1)).sum() / batch["total_texts"].clamp(min=1)

    def _reinforce(
        self, batch: Mapping[str, Tensor], *, logits: Tensor, keep: Tensor, costs: Tensor, scored: Tensor
    ) -> Tensor:
        distortion = costs / scored.clamp(min=1).unsqueeze(1)
        terms = objectives.reinforce(logits, keep=keep, distortion=distortion, mask=batch["mask"])
        return terms.sum() / batch["total_texts"].clamp(min=1)


@torch.no_grad()
def _rows(logits: Tensor, mask: Tensor) -> dict[str, Tensor]:
    chance = torch.sigmoid(logits) * mask
    kept, tokens = chance.sum(1), mask.sum(1)
    mean = kept / tokens.clamp(min=1)
    variance = ((chance - mean.unsqueeze(1)).square() * mask).sum(1) / tokens.clamp(min=1)
    counts = {"tokens": tokens.to(kept.dtype), "texts": mask.any(1).to(kept.dtype)}
    return {"kept": kept, "spread": variance.sqrt(), **counts}
