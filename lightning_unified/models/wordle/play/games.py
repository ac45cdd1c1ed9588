"""Whole games: any player, many secrets at once, and what came out with its uncertainty."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Any, Protocol

from lightning_unified.models.wordle.game.state import MAX_TURNS, State
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.prompts import parse

__all__ = ["Game", "GameReport", "Player", "TrainedPlayer", "play_games", "wilson"]

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


class Player(Protocol):
    """Whoever answers."""

    def answers(self, states: Sequence[State]) -> list[str]:
        """Return one completion (`prompts.STOP` included) for each state, none of them solved."""
        ...


class TrainedPlayer(Player, Protocol):
    """A player out of a checkpoint, which knows what it was trained on.

    Attributes:
        words: The list that it was trained with.
        held_out: The answers that were never the secret of a training game.
        temperature: Of its answers; 0 takes the likeliest.
    """

    words: WordList
    held_out: tuple[str, ...]
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """One game that was played.

    Attributes:
        secret: What was to be found.
        state: Its last state; a guess that was no word of the list is not in it.
        answers: Everything the player wrote, one text a try.
    """

    secret: str
    state: State
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GameReport:
    """What came out of some games.

    Attributes:
        games: How many.
        wins: Those in which the secret was found within `MAX_TURNS` tries.
        win_rate: Their share.
        win_interval: Its 95 % Wilson interval, over secrets.
        mean_turns: Tries until the secret was found, over the games won; None without any.
        turns: How many games were won at each try, from the first to the last.
        tries: Answers in all games.
        format_share: Share of the answers that have the form asked for and nothing behind it.
        valid_share: Share of the answers whose guess is a word of the list.
        consistent_share: Share of the answers whose guess is a word of the list and agrees with all feedback before it.
        played: The games themselves, in the order of the secrets.
    """

    games: int
    wins: int
    win_rate: float
    win_interval: tuple[float, float]
    mean_turns: float | None
    turns: tuple[int, ...]
    tries: int
    format_share: float
    valid_share: float
    consistent_share: float
    played: tuple[Game, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, without the games."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "played"}


def play_games(player: Player, secrets: Sequence[str], words: WordList) -> GameReport:
    """Play one game for each secret, all of them side by side: the player is asked `MAX_TURNS` times at most.

    An answer without a word of the list costs a try and changes nothing else; the player may be lenient about form, that is
    counted apart.

    Raises:
        ValueError: If there is no secret, or one is not an answer of the list.
    """
    strange = [secret for secret in secrets if secret not in words.answer_index]
    if strange or not secrets:
        given = f"{', '.join(strange[:5])} may not be a secret" if strange else "no secret was given"
        raise ValueError(f"{given}; take some of the {len(words.answers)} answers of the list.")
    states = [State() for _ in secrets]
    written: list[list[str]] = [[] for _ in secrets]
    for _ in range(MAX_TURNS):
        running = [number for number, state in enumerate(states) if not state.solved]
        if not running:
            break
        answers = player.answers([states[number] for number in running])
        for number, text in zip(running, answers, strict=True):
            written[number].append(text)
            guess = parse(text).guess
            if guess in words.index:
                states[number] = states[number].after(guess, secrets[number])
    rows = zip(secrets, states, written, strict=True)
    return _report([Game(secret=secret, state=state, answers=tuple(texts)) for secret, state, texts in rows], words)


def wilson(wins: int, games: int) -> tuple[float, float]:
    """Return the 95 % interval of a share.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    share, weight = wins / games, _Z**2 / games
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * sqrt(share * (1 - share) / games + weight / (4 * games)) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def _report(played: Sequence[Game], words: WordList) -> GameReport:
    won = Counter(len(game.answers) for game in played if game.state.solved)
    wins, judged = won.total(), [verdict for game in played for verdict in _judge(game, words)]
    formed, valid, consistent = (fmean(column) for column in zip(*judged, strict=True))
    return GameReport(
        games=len(played),
        wins=wins,
        win_rate=wins / len(played),
        win_interval=wilson(wins, len(played)),
        mean_turns=sum(turn * count for turn, count in won.items()) / wins if wins else None,
        turns=tuple(won[turn] for turn in range(1, MAX_TURNS + 1)),
        tries=len(judged),
        format_share=formed,
        valid_share=valid,
        consistent_share=consistent,
        played=tuple(played),
    )


def _judge(game: Game, words: WordList) -> list[tuple[bool, bool, bool]]:
    """Return, for each answer, whether it is in form, a word, and consistent."""
    state, verdicts = State(), []
    for text in game.answers:
        answer = parse(text)
        valid = answer.guess is not None and answer.guess in words.index
        consistent = valid and state.allows(str(answer.guess))
        verdicts.append((answer.format_ok and not answer.trailing, valid, consistent))
        if valid:
            state = state.after(str(answer.guess), game.secret)
    return verdicts
