"""Generate text with a KV cache, one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_unified.data.documents.record import EOS_ID, PAD_ID
from lightning_unified.models.causal_lm.sampling import Sampling, draw
from lightning_unified.models.gearhead.network import GearHeadNetwork

__all__ = ["generate"]


@torch.no_grad()
def generate(
    network: GearHeadNetwork,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    error_code_ids: Sequence[Sequence[int]] | None = None,
    vocabulary: int | None = None,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, up to and without `</s>`.

    Prompts of different lengths run together, padded on the left with a mask. A text ends at the network's last position.

    Args:
        network: In eval mode during the call, then restored.
        prompts: Token ids, at least one for each prompt.
        sampling: How tokens are drawn.
        error_code_ids: Row of the error table at each token of each prompt; None is 0 everywhere.
        vocabulary: Ids from here on, which only pad the table, are never drawn; None draws from all.
        generator: Random generator; by default torch's own.

    Raises:
        ValueError: If a prompt is empty or leaves no position for an answer.
    """
    if not prompts:
        return []
    lengths, limit = [len(prompt) for prompt in prompts], network.config.positions
    longest = max(lengths)
    if min(lengths) < 1:
        raise ValueError("a prompt is empty; give at least one token, such as <s>.")
    if longest >= limit:
        raise ValueError(
            f"a prompt has {longest} tokens; with {limit} positions at most {limit - 1} leave room for an answer."
        )
    was_training = network.training
    network.eval()
    try:
        return _Run(network, prompts, codes=error_code_ids, sampling=sampling).tokens(vocabulary, generator)
    finally:
        network.train(was_training)


class _Run:
    """State of one generated batch: padded prompts, attention mask and cache."""

    def __init__(
        self,
        network: GearHeadNetwork,
        prompts: Sequence[Sequence[int]],
        *,
        codes: Sequence[Sequence[int]] | None,
        sampling: Sampling,
    ) -> None:
        self.network, self.sampling = network, sampling
        self.device = network.token_embedding.weight.device
        self.width = max(len(prompt) for prompt in prompts)
        self.ids = self._left_padded(prompts, fill=PAD_ID)
        self.codes = None if codes is None else self._left_padded(codes, fill=0)
        self.pads = torch.tensor([self.width - len(prompt) for prompt in prompts], device=self.device)
        self.steps = min(sampling.max_new_tokens, network.config.positions - min(len(prompt) for prompt in prompts))
        self.cache = network.new_cache(batch=len(prompts), length=self.width + self.steps)

    def tokens(self, vocabulary: int | None, generator: torch.Generator | None) -> list[list[int]]:
        drawn: list[list[int]] = [[] for _ in range(len(self.ids))]
        running = torch.ones(len(self.ids), dtype=torch.bool, device=self.device)
        ids, codes = self.ids, self.codes
        for _ in range(self.steps):
            logits = self._read(ids, codes)
            if vocabulary is not None:
                logits[:, vocabulary:] = -torch.inf
            following = draw(logits, sampling=self.sampling, generator=generator)
            running &= following != EOS_ID
            for row, (token, is_running) in enumerate(zip(following.tolist(), running.tolist(), strict=True)):
                if is_running:
                    drawn[row].append(token)
            running &= self.cache.length - self.pads + 1 < self.network.config.positions
            if not running.any():
                break
            ids, codes = following.masked_fill(~running, PAD_ID).unsqueeze(1), None
        return drawn

    def _read(self, ids: Tensor, codes: Tensor | None) -> Tensor:
        """Run `ids` after the cached tokens; return the logits after the last one in fp32."""
        first, last = self.cache.length, self.cache.length + ids.shape[1]
        slots = torch.arange(last, device=self.device)
        positions = (slots[first:] - self.pads[:, None]).clamp(0, self.network.config.positions - 1)
        mask = None
        if bool(self.pads.any()):
            visible = (slots >= self.pads[:, None])[:, None, :] & (slots <= slots[first:, None])
            # A pad attends to itself, since attention over nothing is NaN; no token attends to a pad.
            mask = (visible | (slots == slots[first:, None])).unsqueeze(1)
        hidden = self.network(ids, codes, positions=positions, cache=self.cache, mask=mask)
        return self.network.logits(hidden[:, -1]).float()

    def _left_padded(self, rows: Sequence[Sequence[int]], *, fill: int) -> Tensor:
        return torch.tensor([[fill] * (self.width - len(row)) + list(row) for row in rows], device=self.device)
