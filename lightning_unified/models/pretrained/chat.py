"""Chat tokenizer: a tokenizer with its chat template, stored as plain data in checkpoints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = ["ChatTokenizer"]

_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")


class ChatTokenizer:
    """A tokenizer, the template of a conversation, and the token that ends a turn.

    Args:
        backend: A tokenizer of the `tokenizers` library; it is copied, so that changes here do not affect the given one.
        template: Jinja template of `messages` and `add_generation_prompt`, as in transformers.
        end: The token that ends a model's turn.
        pad: The padding token; None for one of the usual names, else `end`.

    Raises:
        ValueError: If the tokenizer lacks a token, or there is no template.
    """

    def __init__(self, backend: Tokenizer, *, template: str, end: str, pad: str | None = None) -> None:
        self._text = backend.to_str()
        self._backend = Tokenizer.from_str(self._text)
        self._backend.no_padding()
        self._backend.no_truncation()
        if not template:
            raise ValueError("this tokenizer has no chat template; give that of an instruct model.")
        self.template, self.end = template, end
        self.pad = pad or next((one for one in _PADS if self._backend.token_to_id(one) is not None), end)
        self.end_id, self.pad_id = self._id(end), self._id(self.pad)
        self._render = _compiled(template)

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTokenizer":
        """Load a tokenizer that transformers' `save_pretrained` has written.

        Raises:
            FileNotFoundError: If the folder has no `tokenizer.json`.
            ValueError: As the constructor.
        """
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder} holds no tokenizer.json; give the folder of an instruct model.")
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        beside = folder / "chat_template.jinja"
        template = beside.read_text(encoding="utf-8") if beside.is_file() else settings.get("chat_template")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        names = {name: _content(settings.get(name)) for name in ("eos_token", "pad_token")}
        return cls(backend, template=template or "", end=names["eos_token"] or "", pad=names["pad_token"])

    @classmethod
    def from_dict(cls, saved: Mapping[str, str]) -> "ChatTokenizer":
        """Return the tokenizer from the result of `to_dict`."""
        return cls(
            Tokenizer.from_str(saved["tokenizer"]), template=saved["template"], end=saved["end"], pad=saved["pad"]
        )

    def to_dict(self) -> dict[str, str]:
        """Return tokenizer, template and tokens as plain text."""
        return {"tokenizer": self._text, "template": self.template, "end": self.end, "pad": self.pad}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChatTokenizer":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTokenizer.from_dict, (self.to_dict(),)  # a compiled template cannot be pickled

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as text, up to where the model's answer begins."""
        return self._render(messages=messages, add_generation_prompt=True)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
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


def _compiled(template: str) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # as transformers reads them
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
