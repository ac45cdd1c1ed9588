"""Whole games are played by the rules, and counted as they were played."""

import json

import pytest

from lightning_unified.models.wordle.play.games import play_games, wilson
from lightning_unified.models.wordle.prompts import completion


class Script:
    """A player that says the same texts in every game, one after another."""

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), []

    def answers(self, states):
        self.asked.append(states)
        return [self.texts[len(self.asked) - 1]] * len(states)


def say(word):
    return f"<think>x</think>\n<guess>{word}</guess>"


def test_a_game_ends_with_its_secret_and_the_others_go_on(words):
    player = Script(*map(say, ("crane", "zebra", "abide", "speed", "slate", "music")))

    report = play_games(player, ["zebra", "music", "tulip"], words)

    assert [len(states) for states in player.asked] == [3, 3, 2, 2, 2, 2]
    assert (report.wins, report.turns, report.mean_turns) == (2, (0, 1, 0, 0, 0, 1), 4)
    assert [game.state.solved for game in report.played] == [True, True, False]


def test_play_stops_where_every_secret_is_found(words):
    player = Script(say("zebra"))

    assert play_games(player, ["zebra"], words).win_rate == 1
    assert len(player.asked) == 1


def test_an_answer_without_a_word_of_the_list_costs_a_try_and_changes_nothing_else(words):
    player = Script("", say("xylem"), say("zebra"))

    report = play_games(player, ["zebra"], words)

    assert [len(states[0].turns) for states in player.asked] == [0, 0, 0]
    assert (report.mean_turns, report.valid_share) == (3, 1 / 3)


def test_shares_are_of_all_answers(words):
    texts = (say("crane"), "<guess>zonal</guess>", "<guess>crane</guess>", say("tulip") + " more", "", say("music"))
    report = play_games(Script(*texts), ["music"], words)

    assert report.tries == 6
    assert report.format_share == pytest.approx(2 / 6)
    assert report.valid_share == pytest.approx(4 / 6)
    assert report.consistent_share == pytest.approx(
        2 / 6
    )  # the first and the last; crane was tried, tulip has l without u, i kept


def test_a_report_is_json_without_the_games(words):
    record = play_games(Script(say("zebra")), ["zebra"], words).to_dict()

    assert json.loads(json.dumps(record))["win_rate"] == 1
    assert "played" not in record


def test_a_report_without_wins_has_no_mean(words):
    assert play_games(Script(*[""] * 6), ["zebra"], words).mean_turns is None


def test_a_player_is_never_shown_the_secret(words):
    player = Script(*map(say, ("crane", "abide", "tulip", "speed", "slate", "music")))
    play_games(player, ["zebra"], words)

    assert not any(
        "zebra" in str(state) or "zebra" in completion(state, "crane") for states in player.asked for state in states
    )


@pytest.mark.parametrize(("secrets", "said"), [([], "no secret was given"), (["zebra", "xylem"], "xylem may not be")])
def test_a_game_needs_a_secret_of_the_list(words, secrets, said):
    with pytest.raises(ValueError, match=said):
        play_games(Script(), secrets, words)


# W. Wilson's interval at 95 %, from its formula by hand
@pytest.mark.parametrize(
    ("wins", "games", "low", "high"), [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1.0)]
)
def test_the_interval_is_wilsons(wins, games, low, high):
    assert wilson(wins, games) == pytest.approx((low, high), abs=1e-4)
