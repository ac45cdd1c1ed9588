"""Token ids of an example, and which of them the loss scores.

Answers are found in one of two ways. A template with `{% generation %}` marks says where they are. For any other template, the tokens of the
conversation up to an answer must begin the tokens of the whole conversation; the answer is the text after it. Where they do not, as with
templates that shorten earlier turns, the example is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_unified.data.tokenizer import serial
from lightning_unified.models.finetune.data.examples import Example
from lightning_unified.models.pretrained.chat import ChatTokenizer

__all__ = ["AnswerMask", "Encoded"]

LossOn = Literal["answers", "last", "all"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids (S) int32 of an example, and whether each is scored (S) bool."""

    ids: np.ndarray
    scored: np.ndarray


class AnswerMask:
    """Encode examples, and score their answers.

    Args:
        chat: The tokenizer with its template.
        loss_on: "answers": all turns of the assistant; "last": the last one; "all": every token of the conversation. Completions
            are always scored alone, and plain texts as a whole.
        prompts: How a prompt and its completion are written: "chat" as two turns of the template, "text" as they are, followed by the
            end token; "auto" as "chat" if the model has a template.

    Raises:
        ValueError: If `prompts` is "chat" and there is no template.
    """

    def __init__(self, chat: ChatTokenizer, *, loss_on: LossOn, prompts: Literal["auto", "chat", "text"]) -> None:
        if prompts == "chat" and not chat.template:
            raise ValueError("data.prompts=chat needs a chat template, which this model lacks; give data.template.")
        self._chat, self._loss_on = chat, loss_on
        self._as_chat = bool(chat.template) if prompts == "auto" else prompts == "chat"
        self._special = {one.content for one in chat.backend.get_added_tokens_decoder().values()}

    def __call__(self, example: Example) -> Encoded:
        """Return the tokens of an example.

        Raises:
            ValueError: If its answers cannot be found, with its file and line.
        """
        with serial():
            if example.text:
                return self._text(example.text)
            if not example.messages and not self._as_chat:
                return self._completion(example)
            if not self._chat.template:
                raise ValueError(
                    f"{example.where}: this model has no chat template, which conversations need; take an instruct model, give "
                    "data.template=FILE.jinja, or write rows of prompt and completion, or of text."
                )
            try:
                return self._conversation(example)
            except ValueError as error:
                raise ValueError(f"{example.where}: {error}") from error

    def _text(self, text: str) -> Encoded:
        ids = self._encoded_text(text)
        return Encoded(ids, np.ones(len(ids), dtype=bool))

    def _completion(self, example: Example) -> Encoded:
        prompt = self._encoded_text(example.prompt)[:-1]  # without the end token
        answer = [*self._chat.encode(example.completion), self._chat.end_id]
        ids = np.array([*prompt, *answer], dtype=np.int32)
        return Encoded(ids, np.arange(len(ids)) >= len(prompt))

    def _encoded_text(self, text: str) -> np.ndarray:
        """Return the ids of a plain text with the model's start tokens and the end token.

        Names of special tokens in the text stay text.
        """
        backend, end = self._chat.backend, self._chat.end_id
        backend.encode_special_tokens = True
        try:
            ids = backend.encode(text, add_special_tokens=True).ids
        finally:
            backend.encode_special_tokens = False
        return np.array(ids if ids[-1] == end else [*ids, end], dtype=np.int32)

    def _conversation(self, example: Example) -> Encoded:
        turns = example.turns
        if self._chat.marks_answers:
            text, places = self._chat.answers_of(turns)
            ids, scored = self._marked(text, places[-1:] if self._loss_on == "last" else places)
        else:
            ids = self._chat.encode(self._chat.render(turns, is_prompt=False))
            scored = np.zeros(len(ids), dtype=bool)
            for start, stop in self._spans(turns, ids):
                scored[start:stop] = True
        if self._loss_on == "all":
            scored = np.ones(len(ids), dtype=bool)
        if not scored.any():
            raise ValueError("the template renders no answer of this conversation; see data.template.")
        return Encoded(np.array(ids, dtype=np.int32), scored)

    def _marked(self, text: str, places: Sequence[tuple[int, int]]) -> tuple[list[int], np.ndarray]:
        encoding = self._chat.backend.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        scored = np.zeros(len(offsets), dtype=bool)
        for begin, end in places:
            scored |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
        return encoding.ids, scored

    def _spans(self, turns: Sequence, ids: list[int]) -> list[tuple[int, int]]:
        """Return where a conversation's answers lie in its tokens, by comparing tokenised prefixes."""
        if self._loss_on == "all":
            return []
        places = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        found = []
        for place in places[-1:] if self._loss_on == "last" else places:
            asked = self._chat.prompt(turns[:place])
            if ids[: len(asked)] != asked:
                raise ValueError(self._differs(place, "up to it"))
            # text after the last turn belongs to that turn
            through = len(ids)
            if place + 1 < len(turns):
                whole = self._chat.encode(self._chat.render(turns[: place + 1], is_prompt=False))
                through = len(whole)
                if ids[:through] != whole:
                    raise ValueError(self._differs(place, "with it"))
            found.append((len(asked), self._end_of_turn(ids, len(asked), through)))
        return found

    def _differs(self, place: int, which: str) -> str:
        ways = "give data.template a template with {% generation %} marks around the answers"
        if self._loss_on == "answers":
            ways = f"set data.loss_on=last to score the last answer alone, or {ways}"
        return (
            f"the answer in turn {place + 1} cannot be found: the chat template writes the conversation {which} otherwise than it "
            f"begins the whole one; {ways}."
        )

    def _end_of_turn(self, ids: list[int], start: int, stop: int) -> int:
        """Return the end of an answer without white space after the end-of-turn token.

        The template writes that white space.
        """
        end = stop
        while end > start + 1 and not self._chat.decode([ids[end - 1]], skip_special_tokens=False).strip():
            end -= 1
        token = self._chat.backend.id_to_token(ids[end - 1])
        return end if token in self._special else stop
