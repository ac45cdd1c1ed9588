"""Prompt template of Wordle: questions, answers, and the parser of answers.

Supervised training, GRPO, play and evaluation all use it. It is made for small models whose tokens are pieces of words. Each letter of
a guess stands alone with its place and colour, so that no model has to know the spelling of a token. The thought is short, and each of
its parts can be copied from the prompt: letters that are out; letters to move, with the places tried in vain; then the known places
and, exactly six tokens after each, the letters of the word.
"""

import re
from dataclasses import dataclass

from lightning_unified.models.wordle.game.feedback import marks
from lightning_unified.models.wordle.game.state import MAX_TURNS, State, known
from lightning_unified.models.wordle.game.words import LENGTH

__all__ = ["STOP", "THOUGHT", "Answer", "completion", "messages", "parse"]

STOP = "</guess>"
THOUGHT = "<think>"
_COLOURS = ("gray", "yellow", "green")
_SYSTEM = (
    f"Play Wordle: find the secret word of {LENGTH} letters in {MAX_TURNS} guesses. "
    "green: right place. yellow: in the word, at another place. gray: no further copy in the word. "
    "Think first: letters that are out, letters to move and where they were tried, places known and the letters of your word. "
    "Answer as <think>...</think> and <guess>word</guess>."
)
_FORM = re.compile(rf"<think>[^<>]*</think>\n<guess>([a-z]{{{LENGTH}}})</guess>")
_GUESS = re.compile(r"<guess>(.*?)</guess>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Content of a completion.

    Attributes:
        guess: Five letters between the first pair of tags, lower case, or None. It need not be a word of the list.
        format_ok: Whether the completion has exactly the required form, up to the end of the guess.
        trailing: Whether anything but white space follows the guess.
    """

    guess: str | None
    format_ok: bool
    trailing: bool


def messages(state: State) -> list[dict[str, str]]:
    """Return the conversation that asks for the next guess, for a chat template."""
    lines = [f"Guess {len(state.turns) + 1} of {MAX_TURNS}."]
    for turn in state.turns:
        spelled = (
            f"{letter}{place} {_COLOURS[mark]}"
            for place, (letter, mark) in enumerate(zip(turn.guess, marks(turn.code), strict=True), start=1)
        )
        lines.append(f"{turn.guess}: {' '.join(spelled)}")
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n".join(lines)}]


def completion(state: State, guess: str) -> str:
    """Return the answer in the template's form with this guess; it ends with `STOP`."""
    facts = known(state)
    out = "".join(f" {letter}" for letter in facts.out)
    moving = "".join(f" {letter}{''.join(map(str, places))}" for letter, places in facts.moving)
    thought = f"out{out}, move{moving}, {' '.join(facts.placed)}: {' '.join(guess)}"
    return f"{THOUGHT}{thought}</think>\n<guess>{guess}{STOP}"


def parse(text: str) -> Answer:
    """Parse a completion, which includes the stop text; surrounding white space is ignored."""
    text = text.strip()
    form = _FORM.match(text)
    tagged = _GUESS.search(text)
    word = tagged[1].strip().lower() if tagged else ""
    return Answer(
        guess=word if re.fullmatch(rf"[a-z]{{{LENGTH}}}", word) else None,
        format_ok=form is not None,
        trailing=tagged is not None and tagged.end() < len(text),
    )
