"""Feedback is exact, also where letters come twice, one by one and in the table."""

from itertools import product

import numpy as np
import pytest

from lightning_unified.models.wordle.game.candidates import Patterns, expected_bits
from lightning_unified.models.wordle.game.feedback import SOLVED, code_of, feedback, marks
from lightning_unified.models.wordle.game.state import State, Turn
from lightning_unified.models.wordle.game.words import WordList

# every word of three letters' alphabet: letters come up to five times in nearly all of the 59,049 pairs
DENSE = tuple("".join(letters) for letters in product("abc", repeat=5))


def by_counting(guess, secret):
    """Return the marks by counting letters.

    Of each letter, min(copies in the guess, copies in the secret) are marked: green ones first, then from the left.
    """
    found = [2 * (letter == right) for letter, right in zip(guess, secret, strict=True)]
    for letter in set(guess):
        open_marks = min(guess.count(letter), secret.count(letter)) - sum(
            mark == 2 for mark, each in zip(found, guess, strict=True) if each == letter
        )
        rest = [place for place in range(5) if guess[place] == letter and found[place] == 0]
        for place in rest[:open_marks]:
            found[place] = 1
    return tuple(found)


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("crane", "crane", (2, 2, 2, 2, 2)),
        ("crane", "toils", (0, 0, 0, 0, 0)),
        ("speed", "abide", (0, 0, 1, 0, 1)),  # held once: the first e is marked, the second is not
        ("speed", "steal", (2, 0, 2, 0, 0)),  # the green e takes the only one
        ("geese", "elide", (0, 1, 0, 0, 2)),  # a later green mark goes before an earlier yellow one
        ("allay", "llama", (1, 2, 1, 1, 0)),
        ("eerie", "where", (1, 0, 1, 0, 2)),
    ],
)
def test_letters_that_come_twice_are_marked_as_often_as_the_secret_holds_them(guess, secret, expected):
    assert marks(feedback(guess, secret)) == expected


def test_feedback_follows_the_rule_for_every_pair_of_a_dense_alphabet():
    assert all(
        marks(feedback(guess, secret)) == by_counting(guess, secret) for guess, secret in product(DENSE[::5], DENSE)
    )


def test_the_table_holds_the_feedback_of_every_pair():
    patterns = Patterns(WordList(answers=DENSE, guesses=DENSE))

    assert patterns.table().tolist() == [[feedback(guess, secret) for secret in DENSE] for guess in DENSE]


def test_a_code_and_its_marks_are_the_same():
    assert [code_of(marks(code)) for code in range(243)] == list(range(243))
    assert marks(SOLVED) == (2,) * 5


def test_a_word_that_may_not_be_guessed_has_no_row(patterns):
    with pytest.raises(ValueError, match="'xylem' is not in the list of"):
        patterns.row("xylem")


def test_candidates_are_the_answers_that_would_have_given_the_same_feedback(words, patterns, under_way):
    for secret, state in under_way[::4]:
        possible = {words.answers[place] for place in np.flatnonzero(patterns.candidates(state.turns))}

        assert possible == {word for word in words.answers if state.allows(word)}
        assert secret in possible


def test_expected_bits_are_the_entropy_of_the_parts():
    assert expected_bits(np.array([[4, 0, 0], [2, 2, 0], [1, 1, 2]])).tolist() == [0.0, 1.0, 1.5]


def test_gain_is_everything_for_a_guess_that_tells_all_candidates_apart():
    patterns = Patterns(WordList(answers=("aaaaa", "abbbb", "aabbb"), guesses=("aaaaa", "abbbb", "aabbb", "ccccc")))
    everyone = patterns.candidates(())

    assert patterns.gain("aaaaa", everyone) == pytest.approx(1)
    assert patterns.gain("ccccc", everyone) == pytest.approx(0)


def test_gain_is_zero_where_one_candidate_is_left(patterns):
    alone = patterns.candidates(State().after("zebra", "zebra").turns)

    assert alone.sum() == 1
    assert patterns.gain("crane", alone) == 0
    assert patterns.gain("zebra", alone) == 0


def test_contradicting_turns_leave_no_candidate(patterns):
    assert not patterns.candidates((Turn(guess="crane", code=SOLVED), Turn(guess="zebra", code=SOLVED))).any()
