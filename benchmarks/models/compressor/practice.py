"""A reader that has practised on the tokens that every method keeps.

No method is then judged by a reader that knows only another method's choices.

A compressor's own reader has learnt from its own policy's masks: judged by it, other methods' masks are strange to it. Here a
copy of the reader goes on learning from masks of all methods in turn, the policy among them, at budgets drawn anew each time.
"""

import copy
import time

import torch
from torch import Tensor

from lightning_unified.models.compressor.data.passages import Passages
from lightning_unified.models.compressor.evaluation.baselines import Scorer
from lightning_unified.models.compressor.evaluation.subject import top_k
from lightning_unified.models.compressor.module import Compressor

__all__ = ["JudgedBy", "practise"]

_LEARNING_RATE = 3e-4
_BUDGETS = (0.25, 0.95)
_BATCH = 32


class JudgedBy:
    """The policy of one compressor, read by the reader of another."""

    def __init__(self, *, policy: Compressor, reader: Compressor) -> None:
        self.tokenizer, self.device, self.training = policy.tokenizer, policy.device, False
        self.trained_steps, self.global_step = policy.trained_steps, policy.global_step
        self.text_length = policy.text_length
        self.keep_logits = policy.keep_logits
        self.reconstruct, self.next_logits = reader.reconstruct, reader.next_logits
        self.continue_logits = reader.continue_logits

    def train(self, mode: bool = True) -> "JudgedBy":
        """Do nothing: both are in eval mode already."""
        return self


def practise(
    module: Compressor, rows: Passages, *, methods: dict[str, Scorer], minutes: float, seed: int = 0
) -> Compressor:
    """Return a copy of `module` whose reader trained on every method's masks.

    Training takes the given minutes.
    """
    reader = copy.deepcopy(module).train()
    reader.codec.policy.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [weight for weight in reader.parameters() if weight.requires_grad], lr=_LEARNING_RATE, betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(seed)
    begun, passed, step = time.perf_counter(), 0.0, 0
    while passed < 1:
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * (1 - passed)
        batch = rows.__getitems__(torch.randint(len(rows), (_BATCH,), generator=generator).tolist())
        ids, mask = batch["input_ids"], batch["mask"]
        name = list(methods)[step % len(methods)]
        keep = float(torch.empty(1).uniform_(*_BUDGETS, generator=generator))
        with torch.no_grad():
            chosen = top_k(methods[name](ids, mask), mask=mask, keep=keep, seed=step)
        optimizer.zero_grad()
        _loss(reader, ids, mask=mask, keep=chosen, generator=generator).backward()
        optimizer.step()
        step += 1
        passed = (time.perf_counter() - begun) / (60 * minutes)
    reader.trained_steps = module.trained_steps + step
    return reader.eval()


def _loss(reader: Compressor, ids: Tensor, *, mask: Tensor, keep: Tensor, generator: torch.Generator) -> Tensor:
    """Return nats per dropped token plus nats per token after a compressed beginning.

    The beginning has a random length; it is empty for half of the rows.
    """
    codec = reader.codec
    embeddings = codec.reader.embed(ids)
    gates = keep.to(embeddings.dtype).unsqueeze(1)
    restoring = codec.restoring_losses(ids, embeddings=embeddings, gates=gates, mask=mask).squeeze(1)
    dropped = mask & ~keep
    lengths = mask.sum(1)
    starts = ((2 * torch.rand(len(ids), generator=generator) - 1).clamp(min=0) * lengths).long()
    language = codec.language_loss(ids, embeddings=embeddings, keep=keep, mask=mask, starts=starts)
    return (restoring * dropped).sum() / dropped.sum().clamp(min=1) + language / (lengths - starts).sum().clamp(min=1)
