"""Triton kernels of a decode step.

They are products of a few rows with weights, and attention of one token. Such a product takes the time of reading the weights. Each
program reads a few rows of one weight, once, and multiplies them with rows of the input: with two by sums in registers, with more by
tensor cores. Weights of few rows, such as those of adapters, would occupy too few programs of the second kind.
"""

# ruff: noqa: ANN001, ANN202  Triton compiles the functions and has types of its own
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_adapters", "attend", "products"]

_NARROW = 64  # judgement: rows of a weight whose products are sums, however many rows the input has
_LEAST_TILE = 16  # of tl.dot


@triton.jit
def _sums(
    x, weight, bias, out, tile, M: tl.constexpr, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write BLOCK_N columns of x @ weight.T + bias for two rows of x."""
    tiles = tl.cdiv(N, BLOCK_N)
    row = tile // tiles * 2
    columns = tile % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    inner = tl.arange(0, BLOCK_K)[None, :]
    first = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + inner
        weights = tl.load(
            weight + columns.to(tl.int64) * K + at,
            mask=(columns < N) & (at < K),
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        first += weights * tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        if M > 1:
            there = (at < K) & (row + 1 < M)
            second += weights * tl.load(x + (row + 1) * K + at, mask=there, other=0.0).to(tl.float32)
    added = tl.zeros((BLOCK_N, 1), tl.float32)
    if bias is not None:
        added = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * N + columns, (tl.sum(first, 1, keep_dims=True) + added).to(kind), mask=columns < N)
    if M > 1:
        there = (columns < N) & (row + 1 < M)
        tl.store(out + (row + 1) * N + columns, (tl.sum(second, 1, keep_dims=True) + added).to(kind), mask=there)


@triton.jit
def _dots(
    x,
    weight,
    bias,
    out,
    tile,
    M: tl.constexpr,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write BLOCK_N columns of x @ weight.T + bias for up to BLOCK_M rows of x."""
    rows, columns, inner = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + inner
        values = tl.load(x + rows[None, :] * K + at[:, None], mask=(rows[None, :] < M) & (at[:, None] < K), other=0.0)
        weights = tl.load(
            weight + columns[:, None].to(tl.int64) * K + at[None, :],
            mask=(columns[:, None] < N) & (at[None, :] < K),
            other=0.0,
            eviction_policy="evict_first",
        )
        total = tl.dot(weights, values, total)
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + rows[None, :] * N + columns[:, None],
        total.to(out.dtype.element_ty),
        mask=(rows[None, :] < M) & (columns[:, None] < N),
    )


@triton.jit
def _products(
    x,
    weights,
    biases,
    outs,
    sizes,
    M: tl.constexpr,
    K: tl.constexpr,
    BY_SUMS: tl.constexpr,
    SUMS_N: tl.constexpr,
    SUMS_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply one input with several weights: each program takes a tile of one of them.

    Bit i of BY_SUMS says how weight i is multiplied.
    """
    tile = tl.program_id(0)
    first = 0
    for index in tl.static_range(len(weights)):
        if (BY_SUMS >> index) & 1:
            tiles = tl.cdiv(sizes[index], SUMS_N) * ((M + 1) // 2)
        else:
            tiles = tl.cdiv(sizes[index], BLOCK_N)
        if (tile >= first) & (tile < first + tiles):
            if (BY_SUMS >> index) & 1:
                _sums(x, weights[index], biases[index], outs[index], tile - first, M, sizes[index], K, SUMS_N, SUMS_K)
            else:
                _dots(
                    x, weights[index], biases[index], outs[index], tile - first, M, sizes[index], K, BLOCK_M, BLOCK_N, BLOCK_K
                )  # fmt: skip
        first += tiles


@triton.jit
def _add_adapters(
    bases, narrows, ups, outs, sizes, scales, M: tl.constexpr, ranks, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Add narrow @ up.T * scale to each base, one row a program.

    Each operation is rounded as torch rounds it.
    """
    tile = tl.program_id(0)
    first = 0
    for index in tl.static_range(len(bases)):
        tiles = tl.cdiv(sizes[index], BLOCK_N)
        if (tile >= first) & (tile < first + tiles * M):
            N, R = sizes[index], ranks[index]
            row, start = (tile - first) // tiles, (tile - first) % tiles * BLOCK_N
            columns, inner = start + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_R)[None, :]
            there = (columns < N) & (inner < R)
            up = tl.load(ups[index] + columns * R + inner, mask=there, other=0.0).to(tl.float32)
            narrow = tl.load(narrows[index] + row * R + inner, mask=inner < R, other=0.0)
            kind = narrow.dtype
            added = tl.sum(up * narrow.to(tl.float32), 1, keep_dims=True).to(kind).to(tl.float32)
            added = (added * scales[index]).to(kind).to(tl.float32)
            base = tl.load(bases[index] + row * N + columns, mask=columns < N, other=0.0)
            tl.store(outs[index] + row * N + columns, (base.to(tl.float32) + added).to(base.dtype), mask=columns < N)
        first += tiles * M


@triton.jit
def _attend(
    query,
    keys,
    values,
    mask,
    out,
    scale,
    L: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend with the queries of one head of keys, (GROUP, D), to its L slots."""
    pair = tl.program_id(0)
    row = pair // HEADS
    group, wide, slots = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_L)
    at = (pair * GROUP + group[:, None]) * D + wide[None, :]
    there = (group[:, None] < GROUP) & (wide[None, :] < D)
    queries = tl.load(query + at, mask=there, other=0.0)
    most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    base = pair.to(tl.int64) * L * D
    for start in range(0, L, BLOCK_L):
        slot = start + slots
        held = (slot[:, None] < L) & (wide[None, :] < D)
        key = tl.load(keys + base + slot[:, None] * D + wide[None, :], mask=held, other=0.0)
        value = tl.load(values + base + slot[:, None] * D + wide[None, :], mask=held, other=0.0)
        added = tl.load(mask + row * L + slot, mask=slot < L, other=float("-inf")).to(tl.float32)
        scores = tl.dot(queries, tl.trans(key)) * scale + added[None, :]
        higher = tl.maximum(most, tl.max(scores, 1))
        share = tl.exp(most - higher)
        chances = tl.exp(scores - higher[:, None])
        weight = weight * share + tl.sum(chances, 1)
        total = tl.dot(chances.to(queries.dtype), value, total * share[:, None])
        most = higher
    tl.store(out + at, (total / weight[:, None]).to(queries.dtype), mask=there)


def products(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Return x @ weight.T + bias (M, N) for x (M, K) and each weight (N, K).

    Both are contiguous. A result has its weight's dtype, which may be float32 where x is in half precision.
    """
    M, K = x.shape
    outs = [x.new_empty(M, len(weight), dtype=weight.dtype) for weight in weights]
    by_sums = [M <= 2 or len(weight) <= _NARROW or weight.dtype != x.dtype for weight in weights]
    block_m = max(_LEAST_TILE, triton.next_power_of_2(M))
    block_n, block_k, stages = _dots_tile(block_m, sum(map(len, weights)), K, room=_room(x.device))
    sums_n, sums_k = 2, min(1024, triton.next_power_of_2(K))
    tiles = sum(
        triton.cdiv(len(weight), sums_n) * ((M + 1) // 2) if is_sum else triton.cdiv(len(weight), block_n)
        for weight, is_sum in zip(weights, by_sums, strict=True)
    )
    _products[(tiles,)](
        x,
        tuple(weights),
        tuple(biases),
        tuple(outs),
        tuple(map(len, weights)),
        M=M,
        K=K,
        BY_SUMS=sum(is_sum << index for index, is_sum in enumerate(by_sums)),
        SUMS_N=sums_n,
        SUMS_K=sums_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=1 if M <= 2 else stages,
    )
    return outs


@cache
def _room(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may take.

    They are 99 KiB on some GPUs, and 227 KiB on an H200.
    """
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def _dots_tile(rows: int, columns: int, width: int, *, room: int) -> tuple[int, int, int]:
    """Return rows and columns of a weight's tile, and stages of its loads.

    Small tiles occupy all processors where there are few columns. Measured on an H200 with 32 rows.

    Args:
        rows: Rows of the input's tile.
        columns: Rows of all weights.
        width: Columns of a weight.
        room: Bytes of shared memory.
    """
    block_n, most, stages = (64, 64, 6) if columns >= 8192 else (16, 128, 5)
    block_k = min(most, triton.next_power_of_2(width))
    return block_n, block_k, max(min(stages, room // (2 * block_k * (block_n + rows))), 1)


def _slots_at_once(width: int, *, room: int) -> int:
    """Return the slots whose keys and values, twice, fit into shared memory.

    128 were the fastest of those tried on an H200, for 2 and 32 rows.
    """
    return next(slots for slots in (128, 64, 32, 16) if slots == 16 or 8 * slots * width <= room)


def add_adapters(bases: list[Tensor], narrows: list[Tensor], ups: list[Tensor], scales: list[float]) -> list[Tensor]:
    """Return base + (narrow @ up.T) * scale for each base.

    Shapes:
        bases (M, N), narrows (M, R), ups (N, R); all contiguous.
    """
    M = len(bases[0])
    outs = [torch.empty_like(base) for base in bases]
    block_n = 128
    _add_adapters[(sum(triton.cdiv(len(up), block_n) for up in ups) * M,)](
        tuple(bases),
        tuple(narrows),
        tuple(ups),
        tuple(outs),
        tuple(map(len, ups)),
        tuple(scales),
        M=M,
        ranks=tuple(up.shape[1] for up in ups),
        BLOCK_N=block_n,
        BLOCK_R=triton.next_power_of_2(max(up.shape[1] for up in ups)),
        num_warps=4,
    )
    return outs


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention of one token to L slots.

    Shapes:
        query, out (N, H, 1, D), keys and values (N, K, L, D), mask (N, 1, 1, L); all contiguous.
    """
    N, H, _, D = query.shape
    K, L = keys.shape[1], keys.shape[2]
    out, block_d = torch.empty_like(query), max(_LEAST_TILE, triton.next_power_of_2(D))
    _attend[(N * K,)](
        query,
        keys,
        values,
        mask,
        out,
        scale,
        L=L,
        HEADS=K,
        GROUP=H // K,
        D=D,
        BLOCK_L=_slots_at_once(block_d, room=_room(query.device)),
        BLOCK_G=max(_LEAST_TILE, triton.next_power_of_2(H // K)),
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
    return out
