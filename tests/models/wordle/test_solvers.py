"""The solvers play by their rules, and the teacher's games teach only what agrees."""

import numpy as np
import pytest

from lightning_unified.models.wordle.data.traces import traces
from lightning_unified.models.wordle.game.candidates import Patterns, expected_bits
from lightning_unified.models.wordle.game.feedback import SOLVED
from lightning_unified.models.wordle.game.state import State, Turn
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.play.games import play_games
from lightning_unified.models.wordle.play.solvers import EntropyGreedy, RandomConsistent
from lightning_unified.models.wordle.prompts import parse

IMPOSSIBLE = State(turns=(Turn(guess="crane", code=SOLVED), Turn(guess="zebra", code=SOLVED)))


def test_the_greedy_solver_guesses_a_word_of_the_largest_entropy(words, patterns, under_way):
    solver = EntropyGreedy(patterns)
    for _, state in under_way[::6]:
        candidates = patterns.candidates(state.turns)
        if candidates.sum() > 2:
            bits = [expected_bits(np.bincount(patterns.row(word)[candidates], minlength=243)) for word in words.guesses]

            assert bits[words.index[solver.guess(state)]] == pytest.approx(max(bits))


def test_the_greedy_solver_takes_the_secret_where_it_tells_as_much():
    answers = ("baker", "maker", "taker", "raker")
    patterns = Patterns(WordList(answers=answers, guesses=("bmtrs", *answers)))

    assert EntropyGreedy(patterns).guess(State()) == "bmtrs"  # tells all four apart, no answer does
    assert (
        EntropyGreedy(Patterns(WordList(answers=answers[:2], guesses=("bmtrs", *answers[:2])))).guess(State())
        == "baker"
    )


def test_both_solvers_win_nearly_every_game_in_few_tries(words, patterns):
    greedy = play_games(EntropyGreedy(patterns), words.answers[::8], words)
    random = play_games(RandomConsistent(patterns, seed=3), words.answers[::8], words)

    assert greedy.win_rate == 1 and random.win_rate > 0.95
    assert greedy.mean_turns < random.mean_turns
    assert random.consistent_share == 1


def test_the_random_solver_repeats_its_games_with_its_seed(words, patterns):
    first, again, other = (
        play_games(RandomConsistent(patterns, seed=seed), words.answers[:20], words).played for seed in (1, 1, 2)
    )

    assert first == again != other


@pytest.mark.parametrize("kind", [EntropyGreedy, RandomConsistent])
def test_a_solver_refuses_what_no_answer_agrees_with(patterns, kind):
    with pytest.raises(ValueError, match="no answer of the list agrees with the feedback to crane, zebra"):
        kind(patterns).guess(IMPOSSIBLE)


def test_every_guess_of_a_trace_agrees_with_all_feedback(words, patterns):
    shown = list(traces(words, words.answers[::4], seed=0, patterns=patterns))

    assert all(trace.guess in words.index and trace.state.allows(trace.guess) for trace in shown)
    assert all(parse(trace.completion).guess == trace.guess for trace in shown)
    assert {len(trace.state.turns) for trace in shown} >= {0, 1, 2, 3}


def test_games_that_are_lost_are_not_shown(words, patterns):
    shown = list(traces(words, words.answers[:200], seed=0, slips=0.8, patterns=patterns))
    ended = {trace.secret for trace in shown if trace.guess == trace.secret}

    assert 0 < len(ended) < 200
    assert {trace.secret for trace in shown} - ended == set()


def test_slips_are_played_and_not_shown(words, patterns):
    pure = list(traces(words, words.answers[::4], seed=0, slips=0, patterns=patterns))
    slipped = list(traces(words, words.answers[::4], seed=0, slips=0.4, patterns=patterns))

    def misfits(shown):
        return sum(
            not State(turns=trace.state.turns[:number]).allows(turn.guess)
            for trace in shown
            for number, turn in enumerate(trace.state.turns)
        )

    assert misfits(pure) == 0
    assert misfits(slipped) > 0


def test_more_choices_make_a_better_teacher(words, patterns):
    def turns(choices):
        shown = list(traces(words, words.answers[::3], seed=0, choices=choices, slips=0, patterns=patterns))
        return np.mean([len(trace.state.turns) for trace in shown if trace.guess == trace.secret])

    assert turns(32) < turns(1)


def test_traces_repeat_with_their_seed_and_differ_with_another(words, patterns):
    first, again, other = (
        [trace.completion for trace in traces(words, words.answers[:30], seed=seed, patterns=patterns)]
        for seed in (1, 1, 2)
    )

    assert first == again != other


@pytest.mark.parametrize("wrong", [{"choices": 0}, {"slips": 1.0}, {"slips": -0.1}])
def test_a_teacher_without_choice_or_with_nothing_but_slips_is_refused(words, wrong):
    with pytest.raises(ValueError, match="take choices >= 1 and 0 <= slips < 1"):
        traces(words, words.answers, seed=0, **wrong)


def test_a_trace_needs_a_secret_of_the_list(words):
    with pytest.raises(ValueError, match="xylem may not be a secret"):
        traces(words, ["crane", "xylem"], seed=0)


@pytest.mark.slow
def test_a_completion_takes_at_most_64_tokens_of_the_model_that_it_is_made_for(words, patterns):
    compressor = pytest.importorskip("lightning_unified.models.compressor.network.pretrained")
    try:
        tokenizer = compressor.load_tokenizer("smollm2-135m")
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(str(error))
    shown = [trace.completion for trace in traces(words, words.answers, seed=0, slips=0.5, patterns=patterns)]

    assert max(len(tokenizer.encode(text).ids) for text in shown) <= 64
