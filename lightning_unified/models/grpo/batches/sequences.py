"""Prepared batches of completions: one row per sequence, with its scored tokens.

The fields (rows of supervised traces have others, see `causal_lm.labelled_rows`):

- `tokens` (R, S) int64, with all pads at the end, so that causal attention needs no mask;
- `start` (R) int64, the position of the first token that may be scored;
- `chosen` (R, T) int64, the tokens from there on;
- `mask` (R, T) bool, the scored ones among them;
- `total`, their number in the whole batch, a plain number that micro-batches share.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["completed", "outline"]


def completed(prompt: Tensor, prompt_mask: Tensor, *, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return prompts with their completions as rows of a prepared batch, without `total`.

    Shapes:
        prompt and prompt_mask (R, L), pads on the left; ids and mask (R, T), pads on the right; the result has S = L + T.
    """
    start = prompt_mask.sum(1)
    joined = torch.cat([prompt, ids], 1)
    width = joined.shape[1]
    places = torch.arange(width, device=joined.device) + (prompt.shape[1] - start)[:, None]
    return {"tokens": joined.gather(1, places.clamp(max=width - 1)), "start": start, "chosen": ids, "mask": mask}


def outline(
    prompts: int, *, prompt_length: int, group_size: int, max_new_tokens: int, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the largest prepared batch for planning, all zeros; nothing is sampled.

    Args:
        prompts: Prompts of a batch, P.
        prompt_length: Tokens of the longest prompt.
        group_size: Completions of each prompt, G; the batch has P * G rows.
        max_new_tokens: Tokens of the longest completion.
        device: Device of the tensors.
    """
    rows = prompts * group_size
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
    mask = torch.ones(rows, max_new_tokens, dtype=torch.bool, device=device)
    return {
        "tokens": torch.zeros(rows, prompt_length + max_new_tokens, dtype=torch.int64, device=device),
        "start": torch.full((rows,), prompt_length, device=device),
        "chosen": ids,
        "mask": mask,
        "advantages": torch.ones(rows, device=device),
        "sampled_log_probs": torch.zeros(rows, max_new_tokens, device=device),
        "total": rows * max_new_tokens,
        "figures": {},
    }
