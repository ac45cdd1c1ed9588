"""Progress of a rollout: tokens so far, rows that have ended, and when a row ends."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

__all__ = ["Progress", "Stopping"]


class Stopping:
    """Decide after each token whether a completion has ended.

    Many token sequences spell the same text, and a token may hold its last character and more. The stop text is therefore searched
    in the decoded newest tokens, but only if the newest token holds the text's last character.

    Args:
        ids: Tokens that end a completion, such as the end-of-sequence token.
        text: A text that ends a completion, such as "</guess>".
        decode: Turns token ids into text, such as a tokenizer's `decode`; needed with `text`.

    Raises:
        ValueError: If `text` is empty, or given without `decode`.
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
        """Return whether the last of `tokens` ends a completion that had not ended before."""
        newest = tokens[-1]
        if newest in self.ids:
            return True
        if self.text is None or self._decode is None or not self._completes(newest):
            return False
        # each token holds at least one byte of the text
        return self.text in self._decode(list(tokens[-len(self.text.encode()) :]))

    def _completes(self, token: int) -> bool:
        """Return whether `token` holds the text's last character.

        Blanks count, because a token decoded alone loses them.
        """
        if token not in self._may_complete:
            assert self.text is not None and self._decode is not None  # noqa: PT018
            last = self.text[-1]
            self._may_complete[token] = last.isspace() or last in self._decode([token])
        return self._may_complete[token]


class Progress:
    """Tokens and log-probabilities of N rows on the device, and their state on the host.

    Args:
        rows: Number of rows, N.
        most: Upper bound on the tokens of a row.
        device: Device on which tokens are drawn.
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
        """Whether every row that has not ended is at the upper bound."""
        return self._drawn == self._ids.shape[1]

    def add(self, tokens: Tensor, log_probs: Tensor) -> Callable[[], list[int]]:
        """Store a token (K) for each decoded row; return a function that waits for it on the host."""
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
        """Read the newest tokens, and return the indices of decoded rows that have not ended."""
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
        """Continue with the rows `live`, filled to `count` with ended ones; return their indices."""
        alive = set(live)
        over = [place for place in range(len(self._decoded)) if place not in alive]
        places = sorted(live + over[: count - len(live)])
        self._decoded = [self._decoded[place] for place in places]
        kept = torch.tensor(places, device=self._where.device)
        self._where = self._where[kept]
        return kept

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask and log-probabilities (N, T of the longest), and which rows (N) ended."""
        device = self._ids.device
        lengths = torch.tensor([len(tokens) for tokens in self._tokens], device=device)
        T = max(len(tokens) for tokens in self._tokens)
        mask = torch.arange(T, device=device) < lengths[:, None]
        ids, log_probs = self._ids[:, :T] * mask, self._log_probs[:, :T] * mask
        return ids, mask, log_probs, torch.tensor(self._ended, device=device)
