"""The interface of an evaluated compressor, and the tokens it keeps for a budget."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["Encoder", "Subject", "check_keep", "evaluating", "kept_tokens", "require_trained", "top_k"]


class Encoder(Protocol):
    """Interface of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        ...


class Subject(Protocol):
    """Interface of an evaluated compressor.

    Shapes:
        `ids` (B, T) int64; `mask` (B, T) bool, False at pads, which stand at the right; `keep` (B, T) bool, True where a
        token stays; V is the vocabulary.
    """

    tokenizer: Any
    training: bool
    trained_steps: int

    @property
    def global_step(self) -> int:
        """Steps of the trainer that is attached, else 0."""
        ...

    @property
    def text_length(self) -> int:
        """The longest text with trained positions, in tokens."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation, as `nn.Module` does."""
        ...

    def keep_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T) scores; tokens with higher scores are kept first."""
        ...

    def reconstruct(self, ids: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
        """Return the logits (B, T, V) of every token.

        They are predicted from the kept tokens and the tokens before it.
        """
        ...

    def next_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, V) logits of the token after each position of the plain text."""
        ...

    def continue_logits(
        self, ids: Tensor, keep: Tensor, mask: Tensor, continuation: Tensor, continuation_mask: Tensor
    ) -> Tensor:
        """Return the logits (B, U, V) of the continuation.

        They are predicted from the kept tokens and the tokens before it.
        """
        ...


def require_trained(subject: Subject) -> Encoder:
    """Return the tokenizer of a trained subject.

    Raises:
        RuntimeError: If it is untrained.
        ValueError: If it has no tokenizer.
    """
    if not (subject.trained_steps or subject.global_step):
        raise RuntimeError(
            "this compressor has not been trained: its policy would choose by chance. Train it, or load a checkpoint with "
            "lightning_unified.models.compressor.inference.checkpoint.load."
        )
    if subject.tokenizer is None:
        raise ValueError("this compressor has no tokenizer; attach_tokenizer gives it the one it was trained with.")
    return subject.tokenizer


@contextmanager
def evaluating(subject: Subject) -> Iterator[None]:
    """Put a subject in eval mode without gradients; restore its mode afterwards."""
    was_training = subject.training
    subject.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        subject.train(was_training)


def check_keep(keep: float) -> float:
    """Return `keep`; raise a ValueError if it is not a share of the tokens."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r} is not a share of the tokens; give a number above 0, at most 1, as in 0.5.")
    return float(keep)


def kept_tokens(count: int, *, keep: float) -> int:
    """Return how many of `count` tokens stay: round(keep * count), halves to the even number."""
    return round(check_keep(keep) * count)


def top_k(scores: Tensor, *, mask: Tensor, keep: float, seed: int = 0) -> Tensor:
    """Return which tokens stay (B, T) bool: in each row those of highest score.

    A row keeps `kept_tokens` of the tokens where `mask` is True. Draws that depend on the seed and the position alone order
    equal scores. A row's tokens are therefore the same in any batch. Without these draws, a method with many equal scores would
    always keep a prefix.

    Shapes:
        `scores` (B, T) float, on any device; `mask` (B, T) bool, False at pads, which are never kept.

    Raises:
        ValueError: If a token's score is NaN, or `keep` is not a share.
    """
    # sorted on the host: not every device has float64 and stable sorts
    real, values = mask.cpu(), scores.detach().cpu().double()
    if bool(torch.isnan(values[real]).any()):
        raise ValueError("a token's score is NaN; a budget needs scores that can be ordered.")
    counts = [kept_tokens(int(count), keep=keep) for count in real.sum(1).tolist()]
    order = torch.from_numpy(np.random.default_rng(seed).random(scores.shape[1])).argsort().expand(scores.shape)
    for key in (values, real.double()):  # the last decides first: pads come behind every token
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    chosen = torch.arange(scores.shape[1]) < torch.tensor(counts)[:, None]
    return torch.zeros_like(real).scatter(1, order, chosen).to(mask.device)
