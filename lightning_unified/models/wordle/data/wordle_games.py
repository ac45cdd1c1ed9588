"""Games for training and validation: secrets, states of prompts, and rounds of traces.

The module does not import Lightning, since spawned workers load it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.data.own_prompts import OwnPrompt, read_prompts
from lightning_unified.models.wordle.data.traces import Trace, traces
from lightning_unified.models.wordle.data.wordle_rows import TraceRows
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.words import WordList, read_words, split_secrets

__all__ = ["HELD_OUT", "Games", "prepare_games", "round_of"]

HELD_OUT = 1 << 31
"""The number of the one round of held-out secrets."""

_PROMPTS = 1 << 30  # first round number of the prompts' games, above all rounds of the first phase
_OPENINGS = 10  # one in ten states is the first of a game


@dataclass(frozen=True, kw_only=True, slots=True)
class Games:
    """Words, secrets and tokenizer of the games.

    Attributes:
        words: The list.
        patterns: Its feedback table.
        train: Training secrets.
        held_out: Held-out secrets.
        chat: The tokenizer.
        states: Prompts of the second phase: turns of games, or the prompts of a file.
        left_out: Prompts of the file that are left out, because their secret is held out.
    """

    words: WordList
    patterns: Patterns
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    chat: ChatTokenizer
    states: tuple[Trace | OwnPrompt, ...]
    left_out: int = 0


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


def prepare_games(
    source: str,
    *,
    held_out_fraction: float,
    seed: int,
    teacher: Mapping[str, Any],
    prompts: int,
    own_prompts: str | None = None,
    tokenize: Callable[[Sequence[Trace]], ChatTokenizer],
) -> Games:
    """Read the words, split the secrets, and play the games whose states are prompts.

    Args:
        source: Source of the words, see `read_words`.
        held_out_fraction: Share of the answers that are held out.
        seed: Draws the split and the games.
        teacher: Other arguments of `traces`.
        prompts: Number of different states to play for, if the words have that many.
        own_prompts: File of prompts to ask in place of played states, see `read_prompts`.
        tokenize: Returns the tokenizer for the turns of the first round.

    Raises:
        FileNotFoundError: If words or prompts are not there.
        ValueError: If the teacher wins no game, or as `read_prompts`.
    """
    words = read_words(source)
    patterns = Patterns(words)
    train, held_out = split_secrets(words, held_out_fraction=held_out_fraction, seed=seed)

    def states_of(number: int) -> list[Trace]:
        return list(traces(words, train, seed=seed + _PROMPTS + number, patterns=patterns, **teacher))

    states = states_of(0)
    if not states:
        raise ValueError(f"data.slips={teacher['slips']}: the teacher won no game to learn from; lower it.")
    chat = tokenize(states)
    if own_prompts is not None:
        known = {"words": words, "patterns": patterns, "train": train, "held_out": held_out, "chat": chat}
        return _with_own_prompts(Path(own_prompts).expanduser(), **known)
    for number in range(1, prompts):
        if len(_asked(states)) >= prompts:  # no state occurs twice in the first epoch
            break
        states += states_of(number)
    return Games(words=words, patterns=patterns, train=train, held_out=held_out, chat=chat, states=_asked(states))


def _with_own_prompts(path: Path, *, words: WordList, held_out: tuple[str, ...], **known: Any) -> Games:
    """Return games whose prompts are those of a file, without the held-out secrets'."""
    every = read_prompts(path, words)
    asked = tuple(prompt for prompt in every if prompt.secret not in held_out)
    if not asked:
        raise ValueError(
            f"data.prompts: the secret of each of the {len(every)} prompts of {path} is held out; give more prompts, or change "
            "data.held_out_fraction or data.seed."
        )
    return Games(words=words, held_out=held_out, states=asked, left_out=len(every) - len(asked), **known)


def _asked(states: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return the states for prompts: all later states, and few first states.

    First states are few because they have one best answer.
    """
    later = [trace for trace in states if trace.state.turns]
    first = [trace for trace in states if not trace.state.turns]
    return (*later, *first[: max(len(later) // (_OPENINGS - 1), 1)])
