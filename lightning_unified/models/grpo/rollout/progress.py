"""How far the rows of a rollout are: tokens so far, which rows are over, which are still decoded."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_unified.models.grpo.rollout.stopping import Stopping

__all__ = ["Progress"]


class Progress:
    """Tokens and log-probabilities of N rows, on the device, and what the host knows of them.

    Args:
        rows: N.
        most: The most tokens of a row.
        device: Where tokens are drawn.
    """

    def __init__(self, rows: int, *, most: int, device: torch.device) -> None:
        self._ids = torch.zeros(rows, most, dtype=torch.long, device=device)
        self._log_probs = torch.zeros(rows, most, dtype=torch.float32, device=device)
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._decoded = list(range(rows))
        self._where = torch.arange(rows, device=device)
        self._drawn = 0

    @property
    def full(self) -> bool:
        """Whether every row that is not over has as many tokens as it may have."""
        return self._drawn == self._ids.shape[1]

    def add(self, tokens: Tensor, log_probs: Tensor) -> Callable[[], list[int]]:
        """Note a token (K) for each row that is decoded and send them to the host; return what waits for them there."""
        self._ids[self._where, self._drawn] = tokens
        self._log_probs[self._where, self._drawn] = log_probs
        self._drawn += 1
        if not tokens.is_cuda:
            return tokens.tolist
        there = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        there.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return there.tolist()

        return wait

    def look(self, arrived: Callable[[], list[int]], stopping: Stopping) -> list[int]:
        """Take the newest tokens in and return which of the decoded rows, counted from 0, are not over."""
        live = []
        for place, (row, token) in enumerate(zip(self._decoded, arrived(), strict=True)):
            if self._ended[row]:
                continue
            self._tokens[row].append(token)
            if stopping.ends(self._tokens[row]):
                self._ended[row] = True
            else:
                live.append(place)
        return live

    def keep(self, live: list[int], count: int) -> Tensor:
        """Decode only the rows at the places `live`, and as many that are over as make it `count`; return those places."""
        alive = set(live)
        over = [place for place in range(len(self._decoded)) if place not in alive]
        places = sorted(live + over[: count - len(live)])
        self._decoded = [self._decoded[place] for place in places]
        kept = torch.tensor(places, device=self._where.device)
        self._where = self._where[kept]
        return kept

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask, log-probabilities (N, T) and which rows came to their end (N), T being the longest row's length."""
        device = self._ids.device
        lengths = torch.tensor([len(tokens) for tokens in self._tokens], device=device)
        T = max(len(tokens) for tokens in self._tokens)
        mask = torch.arange(T, device=device) < lengths[:, None]
        ids, log_probs = self._ids[:, :T] * mask, self._log_probs[:, :T] * mask
        return ids, mask, log_probs, torch.tensor(self._ended, device=device)
