"""Read a user's examples: conversations, prompts with completions, and plain texts.

- `.jsonl`: one object a line, with `messages` (a list of `{"role": ..., "content": ...}`), or `prompt` and `completion`, or `text`. Each
  may name its `group`, which the split keeps on one side; other fields are ignored.
- `.txt` and `.md`: plain text, one a file. A single file is divided at blank lines, so that a part can be held out.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_unified.data.documents.document import Document
from lightning_unified.data.sources.files import pieces
from lightning_unified.data.sources.lines import json_rows, read_utf8

__all__ = ["Example", "read_examples"]

_FORMS = ("messages", "prompt", "completion", "text")
_UNREAD = {
    "conversations": "rename it to messages, with role and content in place of from and value",
    "tools": "leave such rows out: descriptions of tools are not rendered",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One conversation, one prompt with its completion, or one plain text.

    Attributes:
        where: File and line, for messages.
        group: The split keeps examples of one group on one side; empty for a group of its own.
        messages: The turns of a conversation; empty for other kinds.
        prompt: Text before a completion.
        completion: The text to learn; empty for other kinds.
        text: A plain text; empty for other kinds.
    """

    where: str
    group: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    prompt: str = ""
    completion: str = ""
    text: str = ""

    @property
    def content(self) -> str:
        """All of its text, for sizes and duplicates."""
        turns = [f"{turn['role']}: {turn['content']}" for turn in self.messages]
        return "\n".join(turns) or self.text or f"{self.prompt}\n{self.completion}"

    @property
    def question(self) -> str:
        """The text before the first answer; near copies of an example share it."""
        asked: list[str] = []
        for turn in self.messages:
            if turn["role"] == "assistant":
                break
            asked.append(turn["content"])
        return "\n".join(asked) or self.prompt

    @property
    def turns(self) -> tuple[Mapping[str, str], ...]:
        """A prompt and its completion as a conversation of two turns."""
        asked = {"role": "user", "content": self.prompt}
        return self.messages or (asked, {"role": "assistant", "content": self.completion})

    @property
    def last_answer(self) -> str:
        """The last answer of a conversation, or the completion."""
        return next(turn["content"] for turn in reversed(self.turns) if turn["role"] == "assistant")


def read_examples(path: Path) -> list[Example]:
    """Return the examples of a file or folder.

    Raises:
        FileNotFoundError: If `path` does not exist, or is a folder without such files.
        ValueError: If a file has another suffix, is empty, is not UTF-8, or has an invalid row; with file and line.
    """
    suffixes = ", ".join(_READERS)
    if not path.exists():
        raise FileNotFoundError(f"data.path={path} does not exist; give a file ({suffixes}) or a folder of them.")
    files = sorted(file for file in path.rglob("*") if file.suffix in _READERS) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"data.path={path}: the folder holds no file that ends in {suffixes}.")
    found: list[Example] = []
    for file in files:
        if file.suffix not in _READERS:
            raise ValueError(f"data.path={file}: the file ends in none of {suffixes}; convert it to one of them.")
        examples = list(_READERS[file.suffix](file))
        if not examples:
            raise ValueError(f"{file} is empty; remove it or fill it.")
        found += examples
    return _divided(found[0]) if len(found) == 1 and found[0].text else found


def _divided(example: Example) -> list[Example]:
    """Divide a single text, so that a part of it can be held out."""
    parts = pieces(Document(group="", text=example.text))
    return [Example(where=f"{example.where}, part {number}", text=part.text) for number, part in enumerate(parts, 1)]


def _plain(file: Path) -> Iterator[Example]:
    if text := read_utf8(file).strip():
        yield Example(where=str(file), text=text)


def _jsonl(file: Path) -> Iterator[Example]:
    for where, row in json_rows(read_utf8(file), source=file):
        group = row.get("group", "")
        if not isinstance(group, str):
            raise ValueError(f"{where}: group is {group!r}; it must be text.")  # noqa: TRY004 - a wrong value in a file
        if why := next((f"{where}: field {name!r}: {way}." for name, way in _UNREAD.items() if name in row), ""):
            raise ValueError(why)
        kinds = [kind for kind in ("messages", "completion", "text") if kind in row]
        if len(kinds) != 1:
            raise ValueError(f"{where}: {_form_of(row, kinds)}")
        if kinds == ["messages"]:
            yield Example(where=where, group=group, messages=_messages(row["messages"], where=where))
        elif kinds == ["completion"]:
            texts = {name: _text(row.get(name), name=name, where=where) for name in ("prompt", "completion")}
            yield Example(where=where, group=group, prompt=texts["prompt"], completion=texts["completion"])
        else:
            yield Example(where=where, group=group, text=_text(row["text"], name="text", where=where))


def _form_of(row: Mapping[str, Any], kinds: list[str]) -> str:
    """Return the fault in the fields of a row, in words."""
    forms = "messages, or prompt and completion, or text"
    if kinds:
        return f"a row has one of {forms}, and this one has {' and '.join(kinds)}; keep one."
    near = next((name for given in row for name in difflib.get_close_matches(given, _FORMS, n=1)), None)
    hint = f"; did you mean {near}?" if near else "."
    return f"a row has {forms}, and this one has {', '.join(row) or 'no field'}{hint}"


def _messages(given: Any, *, where: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where}: messages is {given!r:.80}; it must be a list of turns with role and content.")
    turns = []
    for number, turn in enumerate(given, start=1):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
            raise ValueError(f"{where}: turn {number} is {turn!r:.80}; it must have role and content, both text.")
        turns.append({"role": turn["role"], "content": turn["content"]})
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        roles = ", ".join(turn["role"] for turn in turns)
        raise ValueError(f"{where}: no turn of the assistant with content ({roles}), so there is nothing to learn.")
    return tuple(turns)


def _text(given: Any, *, name: str, where: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{where}: {name} is {given!r:.80}; it must be a text that is not blank.")
    return given


_READERS = {".jsonl": _jsonl, ".txt": _plain, ".md": _plain}
