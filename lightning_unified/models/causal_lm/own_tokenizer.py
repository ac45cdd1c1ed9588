"""The tokenizer that a language model keeps, from its data or its checkpoint."""

from collections.abc import Mapping
from typing import Any

from lightning_unified.models.pretrained.chat import ChatTokenizer

__all__ = ["OwnTokenizer"]


class OwnTokenizer:
    """Hold a language model's tokenizer and template, once data or a checkpoint sets them.

    Args:
        data: The data module that sets it, for error messages.
    """

    def __init__(self, *, data: str) -> None:
        self._data = data
        self._chat: ChatTokenizer | None = None

    @property
    def is_set(self) -> bool:
        """Whether data or a checkpoint has set it."""
        return self._chat is not None

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer.

        Raises:
            RuntimeError: If neither data nor a checkpoint has set one.
        """
        if self._chat is None:
            raise RuntimeError(
                f"this model has no tokenizer yet; train it with {self._data}, or load a checkpoint of such a run."
            )
        return self._chat

    def attach(self, chat: ChatTokenizer, *, vocabulary: int) -> None:
        """Set the tokenizer of a model with `vocabulary` rows.

        Raises:
            ValueError: If it has more tokens than the model has rows, or the model was trained with another one.
        """
        if len(chat) > vocabulary:
            raise ValueError(
                f"the tokenizer has {len(chat):,} tokens, the model's vocabulary is {vocabulary:,}; set data.pretrained to the model's "
                f"own, or lower data.vocab_size to {vocabulary}."
            )
        if self._chat is not None and self._chat != chat:
            raise ValueError(
                "this model was trained with another tokenizer or chat template than the data's; set data.pretrained, data.vocab_size "
                "and, where the data have one, data.template as they were."
            )
        self._chat = chat

    def state(self) -> dict[str, Any] | None:
        """Return the tokenizer as plain data; None if it is not set."""
        return None if self._chat is None else self._chat.to_dict()

    def restore(self, saved: Mapping[str, Any] | None, *, vocabulary: int) -> None:
        """Restore the result of `state` for a model with `vocabulary` rows.

        Raises:
            ValueError: As `attach`.
        """
        if saved is not None:
            self.attach(ChatTokenizer.from_dict(saved), vocabulary=vocabulary)
