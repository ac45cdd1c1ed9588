"""Prepared rows of labelled tokens: the model's input and the positions of the loss.

The fields of a prepared batch:

- `tokens` (R, S) int64, with all pads at the end, so that causal attention needs no mask;
- `positions` (R, S) int64, only for packed rows: the position of each token in its own sequence, from 0;
- `places` (R, T) int64, the positions whose hidden states predict a scored token;
- `targets` (R, T) int64, these tokens, -100 at pads;
- `total`, the number of targets in the whole batch, a plain number that micro-batches share.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_unified.nn.linear_cross_entropy import IGNORED

__all__ = ["has_values", "labelled"]

_MULTIPLE = 16  # row lengths are multiples of it: kernels are fast, and few lengths are planned and compiled


def has_values(tensor: Tensor) -> bool:
    """Return whether `tensor` has values; in a dry run there are shapes only."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def labelled(tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> dict[str, Any]:
    """Return a batch of labelled tokens as a prepared batch.

    Columns behind the last label of the longest row are left out, in steps of 16. Without values, as in a dry run, every token but the first is scored.

    Args:
        tokens: (R, S), pads on the right.
        labels: (R, S), the token itself where it is scored, else -100, as for causal models of transformers: each token is
            predicted from those before it. The first token of a row, or of a sequence in a packed row, cannot be scored.
        positions: (R, S), the position of each token in its own sequence, for packed rows.
    """
    packed = {} if positions is None else {"positions": positions}
    if not has_values(tokens):
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
        return {"tokens": tokens, **packed, "places": places, "targets": tokens[:, 1:], "total": tokens[:, 1:].numel()}
    scored = labels != IGNORED
    scored[:, 0] = False
    if positions is not None:
        scored &= positions > 0
    counts = scored.sum(1)
    widest = max(int(counts.amax()), 1)
    # a stable sort puts the scored positions first, in their order
    order = (~scored).sort(dim=1, stable=True).indices[:, :widest]
    is_target = torch.arange(widest, device=labels.device) < counts[:, None]
    last = int((torch.arange(labels.shape[1], device=labels.device) * scored).amax())
    width = (last // _MULTIPLE + 1) * _MULTIPLE
    kept = {name: value[:, :width] for name, value in {"tokens": tokens, **packed}.items()}
    return {
        **kept,
        "places": (order - 1).where(is_target, 0),
        "targets": labels.gather(1, order).where(is_target, IGNORED),
        "total": int(counts.sum()),
    }
