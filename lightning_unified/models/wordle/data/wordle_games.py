"""Rounds of games for training and validation.

The module does not import Lightning, since spawned workers load it.
"""

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
    """Words, secrets and tokenizer of the games.

    Attributes:
        words: The list.
        patterns: Its feedback table.
        train: Training secrets.
        held_out: Held-out secrets.
        chat: The tokenizer.
        states: Turns of games; their states are prompts of the second phase.
    """

    words: WordList
    patterns: Patterns
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    chat: ChatTokenizer
    states: tuple[Trace, ...]


def round_of(number: int, games: Games, *, length: int, seed: int, teacher: Mapping[str, Any]) -> TraceRows:
    """Return the traces of a round: one game per training secret.

    For `HELD_OUT`, the round has one game per held-out secret.

    Args:
        number: Number of the round.
        games: Words, secrets and tokenizer.
        length: See `TraceRows`.
        seed: With the number, decides the games.
        teacher: Other arguments of `traces`.
    """
    secrets = games.held_out if number == HELD_OUT else games.train
    played = traces(games.words, secrets, seed=seed + number, patterns=games.patterns, **teacher)
    return TraceRows(list(played), chat=games.chat, length=length)
