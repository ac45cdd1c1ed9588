"""Traces: a teacher's answers at each turn of the games that it won."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np

from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.state import MAX_TURNS, State
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.prompts import completion, messages

__all__ = ["Trace", "traces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One turn to imitate.

    Attributes:
        secret: The secret; the prompt does not contain it.
        state: The game before the guess.
        guess: The guess to make.
        opening: The part of the answer that the prompt ends with: nothing.
    """

    secret: str
    state: State
    guess: str
    opening: ClassVar[str] = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that asks for the guess."""
        return messages(self.state)

    def text(self, chat: ChatTokenizer) -> str:
        """Return the prompt, up to where the model's answer begins."""
        return chat.render(self.messages)

    @property
    def completion(self) -> str:
        """The answer to imitate: the thought and the guess."""
        return completion(self.state, self.guess)


def traces(
    words: WordList,
    secrets: Sequence[str],
    *,
    seed: int,
    choices: int = 8,
    slips: float = 0.1,
    patterns: Patterns | None = None,
) -> Iterator[Trace]:
    """Return the turns of one won game for each secret, in random order.

    The teacher draws some of the answers that are still possible, and plays the most informative one. So every guess agrees with all
    feedback, and games differ. Now and then, another word is played instead. Such a slip is no trace, but later traces follow it, so
    that the student also learns states after mistakes.

    Args:
        words: The list. For the teacher, any of its answers may be the secret.
        secrets: The answers to play for, once each; another seed gives other games for the same secrets.
        seed: Seed of the order, the draws and the slips.
        choices: Answers drawn for a guess; 1 is a random consistent player, many are greedy.
        slips: Share of turns in which any word of the list is played.
        patterns: The feedback table, to share it between calls; None computes one.

    Raises:
        ValueError: If `choices` is below 1, the share is not in [0, 1), or a secret is not an answer of the list.
    """
    if choices < 1 or not 0 <= slips < 1:
        raise ValueError(f"choices={choices}, slips={slips}; take choices >= 1 and 0 <= slips < 1.")
    strange = [secret for secret in secrets if secret not in words.answer_index]
    if strange:
        raise ValueError(f"{', '.join(strange[:5])} may not be a secret; take answers of the list.")
    random = np.random.default_rng(seed)
    table = patterns or Patterns(words)
    order = [secrets[place] for place in map(int, random.permutation(len(secrets)))]
    games = (_game(table, secret, choices=choices, slips=slips, random=random) for secret in order)
    return chain.from_iterable(games)


def _game(patterns: Patterns, secret: str, *, choices: int, slips: float, random: np.random.Generator) -> list[Trace]:
    words = patterns.words
    state, shown = State(), []
    while not state.solved and len(state.turns) < MAX_TURNS:
        if random.random() < slips:
            guess = words.guesses[random.integers(len(words.guesses))]
        else:
            guess = _teach(patterns, state, choices=choices, random=random)
            shown.append(Trace(secret=secret, state=state, guess=guess))
        state = state.after(guess, secret)
    return shown if state.solved else []


def _teach(patterns: Patterns, state: State, *, choices: int, random: np.random.Generator) -> str:
    candidates = patterns.candidates(state.turns)
    left = np.flatnonzero(candidates)
    drawn = random.choice(left, size=min(choices, len(left)), replace=False)
    return max((patterns.words.answers[place] for place in drawn), key=lambda word: patterns.gain(word, candidates))
