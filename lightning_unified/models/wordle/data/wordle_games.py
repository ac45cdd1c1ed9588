"""Rounds of games on either side of the split, in a module that a spawned worker imports fast: nothing here needs Lightning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.data.traces import Trace, traces
from lightning_unified.models.wordle.data.wordle_rows import TraceRows
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.words import WordList

__all__ = ["HELD_OUT", "Games", "round_of"]

HELD_OUT = 1 << 31
"""The number of the one round of held-out secrets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Games:
    """What games are played with.

    Attributes:
        words: The list.
        patterns: Its feedback table.
        train: Secrets to learn from.
        held_out: Secrets to be judged by.
        chat: Gives the ids.
        states: Turns of games whose states are asked in the second phase.
    """

    words: WordList
    patterns: Patterns
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    chat: ChatTokenizer
    states: tuple[Trace, ...]


def round_of(number: int, games: Games, *, length: int, seed: int, teacher: Mapping[str, Any]) -> TraceRows:
    """Return the traces of a round of new games: one for each secret, for the held-out ones if it is `HELD_OUT`.

    Args:
        number: Of the round.
        games: What they are played with.
        length: As in `TraceRows`.
        seed: With the number, decides the games.
        teacher: More arguments of `traces`.
    """
    secrets = games.held_out if number == HELD_OUT else games.train
    played = traces(games.words, secrets, seed=seed + number, patterns=games.patterns, **teacher)
    return TraceRows(list(played), chat=games.chat, length=length)
