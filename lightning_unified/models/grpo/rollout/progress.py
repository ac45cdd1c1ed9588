"""Progress of a rollout: tokens so far, rows that have ended, and when a row ends."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

__all__ = ["Progress", "Stopping"]


class Stopping:
    """Decides after each token whether a completion is over.

    A text may be cut into tokens in many ways, and its last character may come with more in one token, so that it is looked for
    in what the newest tokens decode to. That is done only when the newest token holds the text's last character.

    Args:
        ids: Tokens that end a completion, such as the end of the sequence.
        text: A text that ends it, such as "</guess>".
        decode: Turns token ids into text, such as a tokenizer's `decode`; needed with `text`.

    Raises:
        ValueError: If there is nothing to stop at, or `text` is given without `decode`.
    """

    def __init__(
        self, *, ids: Collection[int] = (), text: str | None = None, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        if text is not None and (not text or decode is None):
            raise ValueError(f"stop_text={text!r} needs at least one character and decode, which turns ids into text.")
        self.ids = frozenset(int(one) for one in ids)
        self.text = text
        self._decode = decode
        self._may_complete: dict[int, bool] = {}

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether a completion is over with the last of its `tokens`, and was not before it."""
        newest = tokens[-1]
        if newest in self.ids:
            return True
        if self.text is None or self._decode is None or not self._completes(newest):
            return False
        # each token holds at least one byte of the text
        return self.text in self._decode(list(tokens[-len(self.text.encode()) :]))

    def _completes(self, token: int) -> bool:
        """Return whether the text's last character is in what `token` decodes to; blanks get lost when one is decoded alone."""
        if token not in self._may_complete:
            assert self.text is not None and self._decode is not None  # noqa: PT018
            last = self.text[-1]
            self._may_complete[token] = last.isspace() or last in self._decode([token])
        return self._may_complete[token]


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
