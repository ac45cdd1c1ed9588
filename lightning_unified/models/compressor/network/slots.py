"""Arrange slots for a causal reader: real slots first, pads at the end.

Since pads always come last, a causal model needs no attention mask: real slots never attend to a pad, and more pads change nothing.

Letters for shapes: B texts, S slots, T tokens of a text, U tokens of a continuation, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "compact", "followed_by", "gated", "with_separator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Slots of a sequence moved to the front.

    Attributes:
        embeddings: (B, S, D), real slots first in their order, the others behind.
        places: (B, S) int64, the present position of each original slot.
    """

    embeddings: Tensor
    places: Tensor

    def at_front(self, values: Tensor) -> Tensor:
        """Return `values` (B, S) of the original slots in the new order."""
        return torch.zeros_like(values).scatter_(1, self.places, values)

    def back(self, hidden: Tensor, *, start: int = 0) -> Tensor:
        """Return the vectors (B, S - start, D) of the original slots from `start` on."""
        places = self.places[:, start:]
        return hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def compact(embeddings: Tensor, *, real: Tensor) -> Layout:
    """Return the slots (B, S, D) with all slots that are not `real` (B, S) moved to the end."""
    ahead, behind = real.cumsum(1), (~real).cumsum(1)
    places = torch.where(real, ahead, ahead[:, -1:] + behind) - 1
    index = places.unsqueeze(-1).expand_as(embeddings)
    return Layout(embeddings=torch.zeros_like(embeddings).scatter(1, index, embeddings), places=places)


def gated(embeddings: Tensor, *, gates: Tensor, mask_embedding: Tensor) -> Tensor:
    """Return `m e + (1 - m) e_mask`.

    It is the embedding where the gate is 1, and the mask's embedding where the gate is 0.

    Shapes:
        embeddings (..., D), gates (...), mask_embedding (D).
    """
    return torch.lerp(mask_embedding.expand_as(embeddings), embeddings, gates.unsqueeze(-1).to(embeddings.dtype))


def followed_by(first: Tensor, second: Tensor, *, first_real: Tensor, second_real: Tensor, separator: Tensor) -> Layout:
    """Return the layout [first][separator][`second` without its last token].

    The slots from the separator on predict `second`; they are the last U of the original order.

    Shapes:
        first (B, T, D), second (B, U, D), first_real (B, T), second_real (B, U), separator (D).
    """
    B, _, D = second.shape
    between = separator.to(first.dtype).expand(B, 1, D)
    # the slot that predicts token u is real if that token is: pads of `second` take no part
    return compact(torch.cat([first, between, second[:, :-1]], dim=1), real=torch.cat([first_real, second_real], dim=1))


def with_separator(embeddings: Tensor, *, keep: Tensor, mask: Tensor, starts: Tensor, separator: Tensor) -> Layout:
    """Return the layout [kept tokens before `starts`][separator][tokens from `starts` on].

    The last token is left out. The slot t of the original order predicts token t, from `starts` on.

    Shapes:
        embeddings (B, T, D), keep (B, T) bool, mask (B, T) bool, starts (B) int64, separator (D).
    """
    B, T, D = embeddings.shape
    slots = torch.arange(T, device=embeddings.device).unsqueeze(0)
    before, at = slots < starts.unsqueeze(1), slots == starts.unsqueeze(1)
    shifted = torch.cat([embeddings[:, :1], embeddings[:, :-1]], dim=1)
    x = torch.where(before.unsqueeze(-1), embeddings, shifted)
    x = torch.where(at.unsqueeze(-1), separator.to(x.dtype).expand(B, T, D), x)
    return compact(x, real=torch.where(before, keep & mask, mask))
