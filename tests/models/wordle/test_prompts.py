"""What a state says, the template, and what is read out of an answer."""

from collections import Counter

import pytest

from lightning_unified.models.wordle.game.state import State, known
from lightning_unified.models.wordle.prompts import STOP, completion, messages, parse

GAME = State().after("crane", "trade").after("treat", "trade")


def agrees(facts, word):
    """Return whether a word agrees with what is known, read as the docstring of `Known` says."""
    free = [place for place in range(5) if facts.placed[place] == "_"]
    copies = Counter(letter for letter, _ in facts.moving)
    return (
        all(facts.placed[place] in ("_", word[place]) for place in range(5))
        and not any(word[place] in facts.out for place in free)
        and all(sum(word[place] == letter for place in free) >= count for letter, count in copies.items())
        and not any(word[place - 1] == letter for letter, places in facts.moving for place in places)
    )


def test_every_word_that_a_state_allows_agrees_with_what_is_known(words, under_way):
    for _, state in under_way[::4]:
        facts = known(state)

        assert all(agrees(facts, word) for word in words.answers if state.allows(word))


def test_nearly_every_answer_that_agrees_with_what_is_known_is_allowed(words, under_way):
    facts = [(state, known(state)) for _, state in under_way[1::6] + under_way[2::6]]
    agreeing = [(state, word) for state, fact in facts for word in words.answers if agrees(fact, word)]

    assert sum(state.allows(word) for state, word in agreeing) > 0.99 * len(agreeing)


@pytest.mark.parametrize(
    ("guess", "secret", "placed", "moving", "out"),
    [
        ("speed", "abide", "_____", (("e", (3, 4)), ("d", (5,))), ("s", "p")),  # the second e is gray, and e not out
        ("speed", "steal", "s_e__", (), ("p", "e", "d")),  # no further e: out of all free places
        ("allay", "llama", "_l___", (("a", (1, 4)), ("a", (1, 4)), ("l", (3,))), ("y",)),  # two copies have to move
    ],
)
def test_letters_that_come_twice_are_known_as_far_as_the_marks_tell(guess, secret, placed, moving, out):
    facts = known(State().after(guess, secret))

    assert ("".join(facts.placed), facts.moving, facts.out) == (placed, moving, out)


def test_a_letter_to_move_is_no_longer_one_once_it_is_placed():
    before = State().after("alert", "trade")
    facts = known(before.after("trace", "trade"))

    assert [letter for letter, _ in known(before).moving] == ["a", "e", "r", "t"]
    assert (facts.placed, facts.moving, facts.out) == (("t", "r", "a", "_", "e"), (), ("l", "c"))


def test_the_prompt_spells_each_guess_with_places_and_colours():
    asked = messages(GAME)

    assert [message["role"] for message in asked] == ["system", "user"]
    assert asked[1]["content"] == (
        "Guess 3 of 6.\n"
        "crane: c1 gray r2 green a3 green n4 gray e5 green\n"
        "treat: t1 green r2 green e3 yellow a4 yellow t5 gray"
    )


def test_the_prompt_does_not_tell_the_secret():
    assert "trade" not in str(messages(GAME))


def test_a_completion_thinks_aloud_and_ends_with_the_stop_text():
    text = completion(GAME, "trade")

    assert text == "<think>out c n t, move, t r a _ e: t r a d e</think>\n<guess>trade</guess>"
    assert text.endswith(STOP)


def test_each_letter_of_the_word_stands_six_pieces_after_its_place(under_way):
    for secret, state in under_way:
        pieces = completion(state, secret).split("</think>")[0].replace(":", " :").split()

        assert pieces[-5:] == list(secret)
        assert pieces[-6] == ":"
        assert tuple(pieces[-11:-6]) == known(state).placed


def test_a_completion_is_read_back_as_its_guess(under_way):
    for secret, state in under_way:
        answer = parse(completion(state, secret))

        assert (answer.guess, answer.format_ok, answer.trailing) == (secret, True, False)


@pytest.mark.parametrize(
    ("text", "guess", "format_ok", "trailing"),
    [
        ("<think>x</think>\n<guess>crane</guess>\n", "crane", True, False),
        ("<think></think>\n<guess>crane</guess>", "crane", True, False),
        ("<think>x</think>\n<guess>crane</guess> and more", "crane", True, True),
        ("<think>x</think>\n<guess>crane</guess><guess>abide</guess>", "crane", True, True),
        ("<think>x</think><guess>crane</guess>", "crane", False, False),  # no line between
        ("<guess> CRANE </guess>", "crane", False, False),
        ("so: <think>x</think>\n<guess>crane</guess>", "crane", False, False),
        ("<think>x<guess>abide</guess></think>\n<guess>crane</guess>", "abide", False, True),
        ("<think>x</think>\n<guess>cranes</guess>", None, False, False),
        ("<think>x</think>\n<guess>cr4ne</guess>", None, False, False),
        ("<think>x</think>\n<guess>crane", None, False, False),  # cut off
        ("crane", None, False, False),
        ("", None, False, False),
    ],
)
def test_an_answer_is_judged_by_its_form_and_its_guess_is_found_anyway(text, guess, format_ok, trailing):
    answer = parse(text)

    assert (answer.guess, answer.format_ok, answer.trailing) == (guess, format_ok, trailing)
