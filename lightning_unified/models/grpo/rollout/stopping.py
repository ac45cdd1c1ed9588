"""When a completion is over: a token that ends it, or a text that is complete."""

from collections.abc import Callable, Collection, Sequence

__all__ = ["Stopping"]


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
