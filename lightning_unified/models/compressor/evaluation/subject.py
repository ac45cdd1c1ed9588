"""What is evaluated: anything that scores tokens, puts dropped ones back, and reads on after a compressed text."""

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Encoder", "Subject", "require_trained"]


class Encoder(Protocol):
    """A tokenizer, seen from here."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        ...


class Subject(Protocol):
    """The part of `Compressor` that an evaluation asks.

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
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Switch between training and evaluation, as `nn.Module` does."""
        ...

    def keep_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T) scores; the higher, the sooner a token is kept."""
        ...

    def reconstruct(self, ids: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, V) logits of every original token, given the kept ones (and, if it writes in order, those before)."""
        ...

    def next_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, V) logits of the token after each position of the plain text."""
        ...

    def continue_logits(
        self, ids: Tensor, keep: Tensor, mask: Tensor, continuation: Tensor, continuation_mask: Tensor
    ) -> Tensor:
        """Return (B, U, V) logits of the continuation's tokens, given the kept tokens and the continuation before each."""
        ...


def require_trained(subject: Subject) -> Encoder:
    """Return the tokenizer of a subject that was trained: by a trainer that is still attached, or before it was loaded.

    Raises:
        RuntimeError: If nothing says that it was.
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
