"""Compression time: policy and model on the kept tokens, against the model on all tokens."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_unified.models.compressor.evaluation.subject import Subject, top_k

__all__ = ["seconds", "squeeze"]


@torch.no_grad()
def seconds(
    subject: Subject, ids: Tensor, *, mask: Tensor, keeps: tuple[float, ...], repeats: int = 5
) -> list[dict[str, float]]:
    """Return the median wall time of reading one batch, at each budget beside the full context.

    The model reads the kept tokens moved together, as in an application, so that its work shrinks. The variants take turns, so
    that a slowdown of the machine affects all of them.

    Args:
        subject: In eval mode.
        ids: (B, T).
        mask: (B, T).
        keeps: The budgets.
        repeats: Timed passes of each; one more goes before them. 0 for no timing, and no dict.

    Returns:
        One dict a budget: `keep`, `policy_seconds` (scoring and choosing), `lm_compressed_seconds`, `lm_full_seconds`, and
        `ratio`, of the first two together over the third: below 1, compressing pays already for one pass.
    """
    if not repeats:
        return []

    def compressed(keep: float) -> tuple[Tensor, Tensor]:
        return squeeze(ids, keep=top_k(subject.keep_logits(ids, mask), mask=mask, keep=keep))

    variants: dict[str, Callable[[], object]] = {"full": partial(subject.next_logits, ids, mask)}
    for keep in keeps:
        variants[f"policy {keep}"] = partial(compressed, keep)
        variants[f"lm {keep}"] = partial(subject.next_logits, *compressed(keep))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, variant in variants.items():
            taken[name].append(_seconds(variant, device=ids.device))
    median = {name: statistics.median(times[1:]) for name, times in taken.items()}
    return [
        {
            "keep": keep,
            "policy_seconds": median[f"policy {keep}"],
            "lm_compressed_seconds": median[f"lm {keep}"],
            "lm_full_seconds": median["full"],
            "ratio": (median[f"policy {keep}"] + median[f"lm {keep}"]) / median["full"],
        }
        for keep in keeps
    ]


def squeeze(ids: Tensor, *, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept tokens of each row, moved to the left in their order, and their mask."""
    width = max(int(keep.sum(1).max()), 1)
    order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    mask = keep.gather(1, order)
    return ids.gather(1, order).masked_fill(~mask, 0), mask


def _seconds(variant: Callable[[], object], *, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    variant()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
