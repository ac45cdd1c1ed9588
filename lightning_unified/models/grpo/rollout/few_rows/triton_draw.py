"""Triton kernels that draw a token from logits.

One kernel reads the logits once, in parts. A second one joins the parts of each row. Operators of torch would be some thirty small kernels.
"""

# ruff: noqa: ANN001, ANN202  Triton compiles the functions and has types of its own
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw_tokens"]

_PART = 2048  # judgement: two rows of a large vocabulary occupy all processors


@triton.jit
def _read_parts(
    logits, noise, best, place, most, total, inverse, V, parts, IS_NOISY: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Write the highest noisy score of a part of a row, and its place.

    Write the highest score and the sum of exponentials too.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK_V + tl.arange(0, BLOCK_V)
    there = at < V
    scores = tl.load(logits + row * V + at, mask=there, other=float("-inf")).to(tl.float32) * inverse
    keys = scores
    if IS_NOISY:
        keys = scores - tl.log(tl.load(noise + row * V + at, mask=there, other=1.0))
    highest, peak = tl.max(keys, 0), tl.max(scores, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    to = row * parts + part
    tl.store(best + to, highest)
    tl.store(place + to, tl.min(tl.where((keys == highest) & there, at, V - 1), 0))
    tl.store(most + to, peak)
    tl.store(total + to, tl.sum(tl.exp(scores - base), 0))


@triton.jit
def _join_parts(logits, best, place, most, total, tokens, log_probs, inverse, V, parts, BLOCK_P: tl.constexpr):
    """Write a row's token and its log-probability."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    there, at = part < parts, row * parts + part
    keys = tl.load(best + at, mask=there, other=float("-inf"))
    places = tl.load(place + at, mask=there, other=V - 1)
    token = tl.min(tl.where((keys == tl.max(keys, 0)) & there, places, V - 1), 0)
    peaks = tl.load(most + at, mask=there, other=float("-inf"))
    peak = tl.max(peaks, 0)
    sums = tl.load(total + at, mask=there, other=0.0)
    whole = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, tl.load(logits + row * V + token).to(tl.float32) * inverse - whole)


def draw_tokens(logits: Tensor, noise: Tensor | None, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the token (N) of the largest noisy score in each row.

    Its log-probability (N) in float32 follows.

    Args:
        logits: Logits (N, V), contiguous.
        noise: Exponentially distributed values (N, V) in float32, contiguous; None adds no noise.
        temperature: Divides the logits.
    """
    (N, V), device = logits.shape, logits.device
    parts = triton.cdiv(V, _PART)
    best, most, total = torch.empty(3, N, parts, dtype=torch.float32, device=device).unbind()
    place = torch.empty(N, parts, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(parts)
    tokens = torch.empty(N, dtype=torch.long, device=device)
    log_probs = torch.empty(N, dtype=torch.float32, device=device)
    inverse = 1.0 / temperature
    with torch.cuda.device_of(logits):
        _read_parts[(N, parts)](
            logits, noise, best, place, most, total, inverse, V, parts, IS_NOISY=noise is not None, BLOCK_V=_PART
        )
        _join_parts[(N,)](logits, best, place, most, total, tokens, log_probs, inverse, V, parts, BLOCK_P=block)
    return tokens, log_probs
