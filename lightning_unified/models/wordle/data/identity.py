"""Identity of a Wordle model's data: tokenizer, words and lengths.

A checkpoint needs it for play.
"""

from collections.abc import Mapping
from typing import Any

from lightning_unified.models.causal_lm.own_tokenizer import OwnTokenizer
from lightning_unified.models.pretrained.chat import ChatTokenizer

__all__ = ["Identity"]

_SETTINGS = ("words", "held_out_fraction", "seed", "prompt_length")


class Identity:
    """Tokenizer and settings of the games, empty until data or a checkpoint sets them.

    A call decodes token ids.

    Attributes:
        stop_ids: The token that ends a turn; the list is filled when the tokenizer is set.
        game: Settings of `WordleData`: words, split, and length of prompts.
    """

    def __init__(self) -> None:
        self._tokenizer = OwnTokenizer(data="WordleData")
        self.stop_ids: list[int] = []
        self.game: dict[str, Any] = {}

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template.

        Raises:
            RuntimeError: If neither data nor a checkpoint has set one.
        """
        return self._tokenizer.chat

    def __call__(self, ids: list[int]) -> str:
        return self.chat.decode(ids)

    def attach(self, chat: ChatTokenizer, *, vocabulary: int) -> None:
        """Set the tokenizer of a model with `vocabulary` rows, and the token that ends a turn.

        Raises:
            ValueError: If it has more tokens than the model has rows, or the model was trained with another one.
        """
        self._tokenizer.attach(chat, vocabulary=vocabulary)
        self.stop_ids[:] = [chat.end_id]

    def take(self, data: Any, config: Any, *, max_new_tokens: int) -> None:
        """Take tokenizer and settings of `WordleData`.

        Args:
            data: The data module.
            config: The language model's configuration.
            max_new_tokens: Upper bound on the tokens of a completion.

        Raises:
            ValueError: If prompt and completion exceed the model's positions, or as `attach`.
        """
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and positions < data.prompt_length + max_new_tokens:
            raise ValueError(
                f"data.prompt_length={data.prompt_length} and model.max_new_tokens={max_new_tokens} have no place in the model's "
                f"{positions} positions; lower them."
            )
        self.attach(data.chat, vocabulary=config.vocab_size)
        self.game = {name: data.hparams[name] for name in _SETTINGS}

    def state(self) -> dict[str, Any]:
        """Return the identity as plain data."""
        return {"chat": self._tokenizer.state(), "game": dict(self.game)}

    def restore(self, saved: Mapping[str, Any], *, vocabulary: int) -> None:
        """Restore the result of `state` for a model with `vocabulary` rows.

        Raises:
            ValueError: As `attach`.
        """
        self.game = dict(saved["game"])
        if saved["chat"] is not None:
            self.attach(ChatTokenizer.from_dict(saved["chat"]), vocabulary=vocabulary)
