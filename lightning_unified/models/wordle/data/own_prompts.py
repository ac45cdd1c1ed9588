"""Prompts of a user's own file: text and secret, and the guesses that the text tells of."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_unified.data.sources.lines import json_rows, read_utf8
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.game.state import MAX_TURNS, State
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.prompts import THOUGHT

__all__ = ["OwnPrompt", "read_prompts"]

_GUESSES = ("guesses", "past_guess_history")
_ROW = '{"prompt": "…", "secret": "crane", "guesses": ["slate"]}'


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnPrompt:
    """One prompt of the file.

    Attributes:
        secret: The secret.
        state: The game before the answer; without turns if the row names no guesses.
        content: A text, which is the prompt as it is, or messages for the chat template.
    """

    secret: str
    state: State
    content: str | tuple[Mapping[str, str], ...]

    @property
    def opening(self) -> str:
        """The part of the answer that the prompt ends with: the tag of a thought, or nothing."""
        opens = isinstance(self.content, str) and self.content.rstrip().endswith(THOUGHT)
        return THOUGHT if opens else ""

    def text(self, chat: ChatTokenizer) -> str:
        """Return the prompt, up to where the model's answer begins."""
        return self.content if isinstance(self.content, str) else chat.render(self.content)


def read_prompts(path: Path, words: WordList) -> list[OwnPrompt]:
    """Read a `.jsonl` file with one object per line: `prompt`, `secret` and optional `guesses`.

    `prompt` is a text or a list of messages with `role` and `content`. `guesses` are the words guessed before, the oldest first;
    feedback follows from the secret. `past_guess_history` is another name of `guesses`. Its entries may be pairs of a guess and
    its feedback, and it may be the text of such a list.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds no row or an invalid one; with file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"data.prompts: there is no file {path}; give a .jsonl file of rows such as {_ROW}.")
    rows = json_rows(read_utf8(path), source=path)
    found = [_prompt(row, words, where=where) for where, row in rows]
    if not found:
        raise ValueError(f"data.prompts: {path} has no rows; give some, such as {_ROW}.")
    return found


def _prompt(row: Mapping[str, Any], words: WordList, *, where: str) -> OwnPrompt:
    missing = [name for name in ("prompt", "secret") if name not in row]
    if missing:
        raise ValueError(f"{where}: no {' and no '.join(missing)}; give rows such as {_ROW}.")
    secret = str(row["secret"]).strip().lower()
    if secret not in words.answer_index:
        raise ValueError(
            f"{where}: secret={row['secret']!r} is no answer of the {len(words.answers):,} words; correct or remove the row, or give "
            "data.words a list with it."
        )
    state = State()
    for guess in _guesses(row, where=where):
        if guess not in words.index:
            raise ValueError(f"{where}: the guess {guess!r} is none of the words; give data.words a list with it.")
        state = state.after(guess, secret)
        if state.solved or len(state.turns) == MAX_TURNS:
            raise ValueError(f"{where}: the game is over after the guess {guess!r}; leave out the last turn.")
    return OwnPrompt(secret=secret, state=state, content=_content(row["prompt"], where=where))


def _content(prompt: Any, *, where: str) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    messages = tuple(one for one in prompt if isinstance(one, Mapping)) if isinstance(prompt, list) else ()
    if messages and len(messages) == len(prompt) and all({"role", "content"} <= one.keys() for one in messages):
        return messages
    raise ValueError(f"{where}: prompt={prompt!r}; it must be a text, or a list of messages with role and content.")


def _guesses(row: Mapping[str, Any], *, where: str) -> Iterator[str]:
    given = next((row[name] for name in _GUESSES if row.get(name)), ())
    try:
        entries = ast.literal_eval(given) if isinstance(given, str) else given
        words = [_first(entry) for entry in entries]
    except (SyntaxError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{where}: guesses={given!r}; give a list of words.") from error
    yield from (word.strip().lower() for word in words)


def _first(entry: Any) -> str:
    """Return the word of an entry: the entry, or the first of a pair of word and feedback."""
    word = entry[0] if isinstance(entry, Sequence) and not isinstance(entry, str) else entry
    if not isinstance(word, str):
        raise TypeError(f"{word!r} is no word")
    return word
