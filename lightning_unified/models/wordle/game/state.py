"""A game as the player sees it, and the known letters: in place, to move, out."""

from dataclasses import dataclass

from lightning_unified.models.wordle.game.feedback import GRAY, GREEN, SOLVED, YELLOW, feedback, marks
from lightning_unified.models.wordle.game.words import LENGTH

__all__ = ["MAX_TURNS", "Known", "State", "Turn", "known"]

MAX_TURNS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A guess and the code of its feedback (`feedback.feedback`)."""

    guess: str
    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The turns so far, the oldest first, without the secret."""

    turns: tuple[Turn, ...] = ()

    @property
    def solved(self) -> bool:
        """Whether the last guess was the secret."""
        return bool(self.turns) and self.turns[-1].code == SOLVED

    def after(self, guess: str, secret: str) -> "State":
        """Return the state after `guess` and its feedback."""
        return State(turns=(*self.turns, Turn(guess=guess, code=feedback(guess, secret))))

    def allows(self, word: str) -> bool:
        """Return whether `word` as the secret agrees with all feedback."""
        return all(feedback(turn.guess, word) == turn.code for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Knowledge about the secret; a place is free if its letter is unknown.

    Attributes:
        placed: The letter of each place, `_` for a free one.
        moving: Letters that stand in a free place, one entry for each copy, with the places (1 to 5) where they were tried in
            vain; in the order of their first guess.
        out: Letters that are in no free place, in the order of their first guess.
    """

    placed: tuple[str, ...]
    moving: tuple[tuple[str, tuple[int, ...]], ...]
    out: tuple[str, ...]


def known(state: State) -> Known:
    """Return the knowledge from the turns.

    Every word that the state allows agrees with it. It omits only the upper bound on the copies of a letter to move.
    """
    placed = ["_"] * LENGTH
    least: dict[str, int] = {}
    tried: dict[str, set[int]] = {}
    bounded: set[str] = set()
    for turn in state.turns:
        found: dict[str, int] = {}
        for place, (letter, mark) in enumerate(zip(turn.guess, marks(turn.code), strict=True)):
            if mark == GREEN:
                placed[place] = letter
            else:
                tried.setdefault(letter, set()).add(place + 1)
            if mark == GRAY:
                bounded.add(letter)
            found[letter] = found.get(letter, 0) + (mark in {YELLOW, GREEN})
        for letter, copies in found.items():
            least[letter] = max(least.get(letter, 0), copies)
    missing = {letter: copies - placed.count(letter) for letter, copies in least.items()}
    return Known(
        placed=tuple(placed),
        moving=tuple(
            (letter, tuple(sorted(tried.get(letter, ())))) for letter, copies in missing.items() for _ in range(copies)
        ),
        out=tuple(letter for letter, copies in missing.items() if letter in bounded and copies <= 0),
    )
