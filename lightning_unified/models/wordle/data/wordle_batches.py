"""Batches of a run by number: traces in the first phase, then prompts."""

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.loader import BatchRows, ResumableLoader
from lightning_unified.models.wordle.data.wordle_rows import PromptRows, TraceRows

__all__ = ["WordleBatches", "WordleLoader"]


class WordleBatches(BatchRows):
    """All batches of a run by number, as rows of a `ResumableLoader`: each row is a whole batch.

    The first `sft_steps` batches hold traces; every round plays new games for the same secrets. Endless batches of prompts follow,
    each repeated `inner_iterations` times with its number as `iteration`.

    Args:
        rounds: Returns the traces of a round by its number.
        prompts: The states.
        sft_steps: Batches of traces.
        sft_batch_size: Traces of a batch.
        sft_round: Batches of a round.
        grpo_steps: Batches of prompts that the first epoch holds.
        batch_size: Prompts of a batch.
        inner_iterations: Repetitions of a batch of prompts.
        seed: Decides the orders.
        rank: Rank of this process, which takes every world_size-th row.
        world_size: Number of processes that share a batch.
    """

    def __init__(
        self,
        *,
        rounds: Callable[[int], TraceRows],
        prompts: PromptRows,
        sft_steps: int,
        sft_batch_size: int,
        sft_round: int,
        grpo_steps: int,
        batch_size: int,
        inner_iterations: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rounds, self._prompts = rounds, prompts
        self._round: tuple[int, TraceRows] | None = None  # the current round
        self._sft_steps, self._sft_batch_size, self._sft_round = sft_steps, sft_batch_size, sft_round
        self._batch_size, self._inner, self._seed = batch_size, inner_iterations, seed
        self._rank, self._world_size = rank, world_size
        self.bucket_of = np.zeros(sft_steps + grpo_steps * inner_iterations, dtype=np.int64)
        settings = [sft_steps, sft_batch_size, sft_round, batch_size, inner_iterations, seed]
        first = self._rows(0).checksum if sft_steps else 0
        self.checksum = zlib.crc32(np.array([*settings, first, prompts.checksum], dtype=np.int64).tobytes())

    @override
    def __len__(self) -> int:
        return len(self.bucket_of)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the batch of this number, which may exceed the first epoch's."""
        if index < self._sft_steps:
            return self._traces(index)
        batch, iteration = divmod(index - self._sft_steps, self._inner)
        chosen = self._shared(self._chosen(batch, self._batch_size, of=len(self._prompts), stream=1))
        found = self._prompts.__getitems__(chosen)
        return found if self._inner == 1 else {**found, "iteration": torch.tensor(iteration)}

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the one batch of the list."""
        return self[indices[0]]

    def _traces(self, index: int) -> dict[str, Tensor]:
        number, batch = divmod(index, self._sft_round)
        rows = self._rows(number)
        chosen = self._chosen(batch, self._sft_batch_size, of=len(rows), stream=2 + number)
        if index == 0:  # memory is planned by the first batch, so it has the longest rows
            longest = rows.longest()
            chosen[: len(longest)] = longest[: len(chosen)]
        return rows.__getitems__(self._shared(chosen))

    def _rows(self, number: int) -> TraceRows:
        if self._round is None or self._round[0] != number:
            self._round = number, self._rounds(number)
        return self._round[1]

    def _chosen(self, batch: int, size: int, *, of: int, stream: int) -> list[int]:
        """Return the rows of a batch: every row once, in a new order, before any row again."""
        places = range(batch * size, (batch + 1) * size)
        return [int(_order(of, self._seed, stream, place // of)[place % of]) for place in places]

    def _shared(self, chosen: Sequence[int]) -> list[int]:
        return list(chosen[self._rank :: self._world_size])


class WordleLoader(ResumableLoader):
    """Loader of batches in order; an epoch continues where the one before ended, without traces."""

    @override
    def _plan(self) -> list[list[int]]:
        start = self._epoch * len(self)
        return [[index] for index in range(start, start + len(self))]


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, stream: int, time: int) -> np.ndarray:
    return np.random.default_rng([seed, stream, time]).permutation(rows)
