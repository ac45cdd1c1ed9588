"""Compress a text: a trained policy chooses exactly the requested number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_unified.models.compressor.evaluation.pieces import pad_rows
from lightning_unified.models.compressor.evaluation.subject import check_keep, evaluating, require_trained, top_k
from lightning_unified.models.compressor.inference.checkpoint import load
from lightning_unified.models.compressor.module import Compressor

__all__ = ["Compression", "compress"]

_ROWS = 16  # windows scored at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """A compressed text: its kept tokens and the original tokens.

    Attributes:
        text: The kept tokens, as text; a character with only some bytes kept appears as a replacement character.
        ids: The kept tokens, in order.
        kept: Their positions in the original, from 0.
        original_ids: All tokens.
        keep: The requested share of tokens; `len(ids)` is `round(keep * len(original_ids))`.
    """

    text: str
    ids: list[int]
    kept: list[int]
    original_ids: list[int]
    keep: float

    @property
    def flags(self) -> list[bool]:
        """Whether each token of the original was kept."""
        kept = set(self.kept)
        return [place in kept for place in range(len(self.original_ids))]


def compress(
    text: str,
    *,
    keep: float = 0.5,
    module: Compressor | None = None,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Compression:
    """Return `text` with the share `keep` of its tokens: the tokens with the highest scores.

    A text longer than those it was trained on is scored in windows; the tokens are then chosen over the whole text, so that a
    dense passage may keep more than an empty one.

    Args:
        text: The text to compress.
        keep: Share of the tokens that stays, above 0, at most 1.
        module: A trained compressor in memory.
        checkpoint: Or the file of one; give exactly one of the two.
        device: Where the checkpoint's weights go: "cpu", "cuda", "mps" or "auto", the accelerator that is here.
        seed: Orders tokens of equal score.

    Raises:
        ValueError: If `keep` is not a share, the text is empty, or not exactly one of module and checkpoint is given.
        FileNotFoundError: If there is no such checkpoint.
        RuntimeError: If it is no compressor's, or nothing has been trained.
    """
    check_keep(keep)
    if (module is None) == (checkpoint is None):
        raise ValueError("give either module=, a trained compressor, or checkpoint=, the file of one.")
    if module is None:
        module = load(Path(str(checkpoint)), device=device)
    encoder = require_trained(module)
    ids = encoder.encode(text)
    if not ids:
        raise ValueError("the text is empty; there is nothing to compress.")
    scores = _scores(module, ids)
    chosen = top_k(scores[None], mask=torch.ones(1, len(ids), dtype=torch.bool), keep=keep, seed=seed)[0]
    kept = chosen.nonzero().squeeze(1).tolist()
    rest = [ids[place] for place in kept]
    return Compression(text=encoder.decode(rest), ids=rest, kept=kept, original_ids=list(ids), keep=keep)


def _scores(module: Compressor, ids: Sequence[int]) -> Tensor:
    """Return the policy's scores (N,), on the host.

    All windows have nearly the same length, so that no window is a short rest.
    """
    windows = torch.tensor(ids, device=module.device).tensor_split(-(-len(ids) // module.text_length))
    found = []
    with evaluating(module):
        for start in range(0, len(windows), _ROWS):
            rows, mask = pad_rows(windows[start : start + _ROWS])
            found.append(module.keep_logits(rows, mask)[mask].float().cpu())
    return torch.cat(found)
