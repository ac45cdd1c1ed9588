"""Chat tokenizer: a tokenizer with its chat template, stored as plain data in checkpoints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lightning_unified.models.pretrained.template import ChatTemplate

__all__ = ["PLAIN_TEMPLATE", "ChatTokenizer"]

PLAIN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Chat template of a tokenizer that was trained here, with `</s>` as the end of a turn."""

_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # names that templates use


class ChatTokenizer:
    """A tokenizer, the template of a conversation, and the token that ends a turn.

    Args:
        backend: A tokenizer of the `tokenizers` library; it is copied, so that changes here do not affect the given one.
        template: Jinja template of `messages` and `add_generation_prompt`, as in transformers; empty for a base model, which has none.
        end: The token that ends a model's turn.
        pad: The padding token; None for one of the usual names, else `end`.
        special: Further tokens that the template names, as in `{"bos_token": "<s>"}`.

    Raises:
        ValueError: If the tokenizer lacks a token, or the template is invalid.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        template: str,
        end: str,
        pad: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self._text = backend.to_str()
        self._backend = Tokenizer.from_str(self._text)
        self._backend.no_padding()
        self._backend.no_truncation()
        self.template, self.end = template, end
        self.pad = pad or next((one for one in _PADS if self._backend.token_to_id(one) is not None), end)
        self.end_id, self.pad_id = self._id(end), self._id(self.pad)
        self.special = dict(special or {})
        self._chat_template = ChatTemplate(template, special={"eos_token": end, "pad_token": self.pad, **self.special})

    @classmethod
    def from_folder(cls, folder: Path, *, template: str | None = None) -> "ChatTokenizer":
        """Load a tokenizer that transformers' `save_pretrained` has written.

        Args:
            folder: Holds `tokenizer.json` and `tokenizer_config.json`.
            template: A chat template in place of the folder's own.

        Raises:
            FileNotFoundError: If the folder has no `tokenizer.json`.
            ValueError: As the constructor.
        """
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no tokenizer.json; give the folder of a model with a fast tokenizer."
            )
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        beside = folder / "chat_template.jinja"
        if template is None:
            template = beside.read_text(encoding="utf-8") if beside.is_file() else settings.get("chat_template")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = {name: text for name in _SPECIAL if (text := _content(settings.get(name))) is not None}
        return cls(
            backend,
            template=template or "",
            end=special.get("eos_token", ""),
            pad=special.get("pad_token"),
            special=special,
        )

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "ChatTokenizer":
        """Return the tokenizer from the result of `to_dict`."""
        return cls(
            Tokenizer.from_str(saved["tokenizer"]),
            template=saved["template"],
            end=saved["end"],
            pad=saved["pad"],
            special=saved["special"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return tokenizer, template and tokens as plain data."""
        return {
            "tokenizer": self._text,
            "template": self.template,
            "end": self.end,
            "pad": self.pad,
            "special": self.special,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChatTokenizer":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTokenizer.from_dict, (self.to_dict(),)  # a compiled template cannot be pickled

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the model's turns by `{% generation %}`."""
        return self._chat_template.marks_answers

    def render(self, messages: Sequence[Mapping[str, Any]], *, is_prompt: bool = True) -> str:
        """Return a conversation as text; a prompt goes up to where the model's next answer begins.

        Raises:
            ValueError: If there is no template, or it refuses the conversation.
        """
        return self._chat_template.render(messages, is_prompt=is_prompt)[0]

    def answers_of(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the character spans of its marked answers.

        Raises:
            ValueError: As `render`.
        """
        return self._chat_template.render(messages, is_prompt=False)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation, up to where the model's answer begins."""
        return self.encode(self.render(messages))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; names of special tokens become those tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        return self._backend.get_vocab_size()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTokenizer) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self._text, self.template))

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"{token!r} is no token of this tokenizer; give one that ends a turn of its model.")
        return found


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
