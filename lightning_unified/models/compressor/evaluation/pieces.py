"""Pieces of documents for evaluation: a prefix to compress, and its continuation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_unified.models.compressor.evaluation.subject import Encoder

__all__ = ["SHORTEST_PIECE", "Batch", "Piece", "batches", "divide", "pad_rows"]

SHORTEST_PIECE = 20  # tokens: with fewer, budgets of .9 and 1 are equal, and a continuation is one word


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of one document.

    Attributes:
        document: Number of the document; statistics are over documents, not pieces.
        ids: The tokens to compress.
        continuation: The tokens that follow.
    """

    document: int
    ids: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Pieces side by side, padded at the right with id 0.

    Shapes:
        `ids`, `mask` (B, T); `continuation`, `continuation_mask` (B, U); `documents` (B,), on the host.
    """

    ids: Tensor
    mask: Tensor
    continuation: Tensor
    continuation_mask: Tensor
    documents: np.ndarray


def divide(texts: Sequence[str], *, encoder: Encoder, length: int, continuation: int, per_document: int) -> list[Piece]:
    """Return the pieces of each text, at even distances through it, none overlapping another.

    Args:
        texts: One text for each document.
        encoder: The tokenizer.
        length: Tokens of a prefix.
        continuation: Tokens of a continuation. A document shorter than both is one piece, divided in the same proportion.
        per_document: Largest number of pieces of a document, to limit the time for long ones.

    Raises:
        ValueError: If a size is too small, or no document has `SHORTEST_PIECE` tokens.
    """
    whole = length + continuation
    if continuation < 1 or whole < SHORTEST_PIECE or per_document < 1:
        raise ValueError(
            f"length={length}, continuation={continuation}, per_document={per_document}: a piece has at least "
            f"{SHORTEST_PIECE} tokens, one of them in the continuation, and a document at least one piece."
        )
    pieces = []
    for document, text in enumerate(texts):
        ids = encoder.encode(text)
        starts = range(0, max(len(ids) - whole, 0) + 1, whole)
        taken = np.unique(np.linspace(0, len(starts) - 1, min(per_document, len(starts))).round().astype(int))
        for start in (starts[place] for place in taken):
            part = ids[start : start + whole]
            if len(part) >= SHORTEST_PIECE:
                end = len(part) - max(1, round(len(part) * continuation / whole))
                pieces.append(Piece(document=document, ids=tuple(part[:end]), continuation=tuple(part[end:])))
    if not pieces:
        raise ValueError(
            f"none of the {len(texts)} documents has {SHORTEST_PIECE} tokens; give longer texts to evaluate on."
        )
    return pieces


def batches(pieces: Sequence[Piece], *, size: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
    """Yield the pieces in batches of `size`, with pieces of similar length together."""
    ordered = sorted(pieces, key=lambda piece: (len(piece.ids), piece.document))
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        ids, mask = pad_rows([torch.tensor(piece.ids, device=device) for piece in part])
        continuation, continuation_mask = pad_rows([torch.tensor(piece.continuation, device=device) for piece in part])
        yield Batch(
            ids=ids,
            mask=mask,
            continuation=continuation,
            continuation_mask=continuation_mask,
            documents=np.array([piece.document for piece in part]),
        )


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows of tokens as ids (B, T), padded on the right with 0, and their mask (B, T)."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
