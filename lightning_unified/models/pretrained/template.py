"""Chat templates: Jinja as transformers reads it, with the places of marked answers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ChatTemplate"]

_BEGIN, _END = "\ue000", "\ue001"  # of a marked answer: private-use characters, which no text should have
_MARK = re.compile(r"{%-?\s*generation\b")


class ChatTemplate:
    """A compiled chat template.

    Its functions are transformers' own but for `strftime_now`: a conversation would have other tokens tomorrow, and a run could not be
    resumed. Templates that ask whether it is defined, as Llama's, then name a fixed date.

    Args:
        text: The Jinja template; empty for none.
        special: Special tokens by the names that templates use, as in `{"bos_token": "<s>"}`.

    Raises:
        ValueError: If the template is invalid.
    """

    def __init__(self, text: str, *, special: Mapping[str, str]) -> None:
        self._special = dict(special)
        self._render = _compiled(text) if text else None
        self.marks_answers = bool(_MARK.search(text))

    def render(self, messages: Sequence[Mapping[str, Any]], *, is_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the places of its marked answers, in characters.

        Args:
            messages: The turns, each with `role` and `content`.
            is_prompt: Whether the text ends where the model's next answer begins.

        Raises:
            ValueError: If there is no template, or it refuses the conversation.
        """
        if self._render is None:
            raise ValueError("this tokenizer has no chat template; give that of an instruct model.")
        if any(mark in json.dumps(list(messages), ensure_ascii=False) for mark in (_BEGIN, _END)):
            raise ValueError("a message holds the character U+E000 or U+E001, which mark answers here; remove it.")
        from jinja2.exceptions import TemplateError

        try:
            marked = self._render(messages=messages, add_generation_prompt=is_prompt, **self._special)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        return _without_marks(marked)


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    parts: list[str] = []
    places: list[tuple[int, int]] = []
    length = begin = 0
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN:
            begin = length
        elif part == _END:
            places.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), places


def _compiled(template: str) -> Callable[..., str]:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}` of transformers' templates."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    # as transformers reads them
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = as_json
    try:
        return environment.from_string(template).render
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is invalid in line {error.lineno}: {error.message}") from error
