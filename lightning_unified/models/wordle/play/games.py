"""Play whole games of any player, many secrets at once, and report the results."""

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
    """A player: answers states."""

    def answers(self, states: Sequence[State]) -> list[str]:
        """Return one completion, `prompts.STOP` included, for each unsolved state."""
        ...


class TrainedPlayer(Player, Protocol):
    """A player from a checkpoint, with the words of its training.

    Attributes:
        words: The list of words in training.
        held_out: The answers that were never the secret of a training game.
        temperature: Sampling temperature; 0 takes the likeliest token.
    """

    words: WordList
    held_out: tuple[str, ...]
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """A played game.

    Attributes:
        secret: The secret.
        state: The last state, without guesses that were no word of the list.
        answers: The player's texts, one for each try.
    """

    secret: str
    state: State
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GameReport:
    """Results of several games.

    Attributes:
        games: Number of games.
        wins: Games in which the secret was found within `MAX_TURNS` tries.
        win_rate: Share of wins.
        win_interval: 95 % Wilson interval of that share, over secrets.
        mean_turns: Mean number of tries in won games; None without any.
        turns: Number of wins at each try, from the first to the last.
        tries: Answers in all games.
        format_share: Share of answers with the required form and nothing after it.
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
        """Return the results for JSON, without the games."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "played"}


def play_games(player: Player, secrets: Sequence[str], words: WordList) -> GameReport:
    """Play one game for each secret, all together, with at most `MAX_TURNS` calls of the player.

    An answer without a word of the list costs a try and has no other effect. The form of answers is counted separately.

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
    """Return the 95 % Wilson interval of a share.

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
    """Return for each answer whether it has the form, is a word, and is consistent."""
    state, verdicts = State(), []
    for text in game.answers:
        answer = parse(text)
        valid = answer.guess is not None and answer.guess in words.index
        consistent = valid and state.allows(str(answer.guess))
        verdicts.append((answer.format_ok and not answer.trailing, valid, consistent))
        if valid:
            state = state.after(str(answer.guess), game.secret)
    return verdicts
