"""Plain-text tokenizer, for trained and pretrained tokenizers alike."""

from collections.abc import Sequence

from tokenizers import Tokenizer

__all__ = ["TextTokenizer"]


class TextTokenizer:
    """A tokenizer that adds no special tokens and reads their names in a text as characters.

    Args:
        backend: The tokenizer of the `tokenizers` library; it is copied.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._text = backend.to_str()
        self._backend = Tokenizer.from_str(self._text)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokens with their ids."""
        return self._backend.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextTokenizer) and self.vocabulary == other.vocabulary

    def __hash__(self) -> int:
        return hash(self._text)

    def to_str(self) -> str:
        """Return the tokenizer as JSON."""
        return self._text
