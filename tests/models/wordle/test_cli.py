"""On the command line a person plays, watches, compares and is helped."""

import json
import sys
from types import SimpleNamespace

import pytest

from lightning_unified.models.wordle.__main__ import main
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import WordList, read_words, split_secrets
from lightning_unified.models.wordle.play.terminal import keyboard
from lightning_unified.models.wordle.prompts import completion


@pytest.fixture
def type_in(monkeypatch):
    """Return a function that sets what a person types, line by line; after it the input ends."""

    def set_lines(*lines):
        left = iter(lines)

        def read(prompt=""):
            print(prompt, end="")
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return set_lines


@pytest.fixture
def model(monkeypatch):
    """Put a player that always says crane in the place of the one out of a checkpoint."""
    some = (*read_words("builtin").answers[::20], "crane", "slate")  # the last one is zebra
    words = WordList(answers=some, guesses=some)

    class ModelPlayer:
        temperature, played_at = 0.0, []  # the latter by all of them

        def __init__(self, checkpoint, *, device):
            self.words, self.held_out = words, split_secrets(words, held_out_fraction=0.1, seed=0)[1]

        def answers(self, states):
            self.played_at.append(self.temperature)
            return [completion(state, "crane") for state in states]

    monkeypatch.setitem(
        sys.modules, "lightning_unified.models.wordle.play.player", SimpleNamespace(ModelPlayer=ModelPlayer)
    )
    return ModelPlayer("any.ckpt", device="cpu")


def test_a_person_finds_the_secret(type_in, capsys):
    type_in("nonsense", "Crane ", "zebra")

    assert main(["play", "--secret", "zebra"]) == 0
    shown = capsys.readouterr().out
    assert "'nonsense' is not in the list" in shown
    assert " C  R  A  N  E   xyyxy" in shown
    assert "Found in 2 of 6." in shown


def test_a_person_who_does_not_find_the_secret_is_told(type_in, capsys):
    type_in(*["crane"] * 6)

    assert main(["play", "--secret", "zebra"]) == 0
    assert "The word was ZEBRA." in capsys.readouterr().out


def test_leaving_the_game_is_no_error(type_in):
    type_in("crane")

    assert main(["play"]) == 0


def test_against_a_model_its_letters_stay_hidden_until_the_end(type_in, model, capsys):
    type_in("slate", "zebra")

    assert main(["play", "--secret", "zebra", "--checkpoint", "any.ckpt"]) == 0
    during, after = capsys.readouterr().out.split("The model:")
    assert "the model                  xyyxy" in during
    assert "C  R  A" not in during
    assert after.count(" C  R  A  N  E ") == 6
    assert "ZEBRA not found." in after


def test_a_model_is_watched_thinking(model, capsys):
    assert main(["play", "--watch", "--secret", "crane", "--checkpoint", "any.ckpt"]) == 0
    shown = capsys.readouterr().out
    assert "<think>out, move, _ _ _ _ _: c r a n e</think>" in shown
    assert "CRANE found in 1 of 6." in shown


def test_evaluation_compares_on_the_secrets_held_out(model, capsys):
    assert main(["evaluate", "--checkpoint", "any.ckpt", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["player"] for record in records] == ["model", "entropy", "random"]
    assert {record["games"] for record in records} == {len(model.held_out)}
    assert records[0]["wins"] == ("crane" in model.held_out)


def test_evaluation_takes_the_likeliest_answers_unless_asked_otherwise(model, capsys):
    for asked, temperature in (([], 0.0), (["--temperature", "0.7"], 0.7)):
        assert main(["evaluate", "--checkpoint", "any.ckpt", "--json", *asked]) == 0
        assert model.played_at[-1] == temperature


def test_evaluation_on_secrets_seen_leaves_those_held_out_alone(model, capsys):
    assert main(["evaluate", "--checkpoint", "any.ckpt", "--seen", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert record["games"] == len(model.words.answers) - len(model.held_out)


def test_the_table_of_players_fits_a_terminal(capsys):
    assert main(["evaluate", "--games", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("100.0% (56.6-100.0)" in line for line in lines)


def test_a_solver_shows_its_game(capsys):
    assert main(["solve", "--secret", "zebra"]) == 0
    assert " Z  E  B  R  A   ggggg" in capsys.readouterr().out


def test_a_solver_helps_with_a_game_played_elsewhere(type_in, capsys):
    type_in("oops", "ggggg")

    assert main(["solve"]) == 0
    shown = capsys.readouterr().out
    assert "'oops' is not 5 marks" in shown
    assert "721 possible" in shown


def test_marks_that_no_answer_has_are_an_error(type_in, capsys):
    type_in("gxgxg", "gxgxg", "gxgxg", "gxgxg")

    assert main(["solve"]) == 2
    assert "no answer of the list agrees" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["play", "--secret", "xylem"], "xylem is not one of the 721 answers"),
        (["play", "--watch"], "give --checkpoint"),
        (["evaluate", "--games", "0"], "take 1 to 721"),
        (["evaluate", "--seen"], "give its --checkpoint"),
        (["evaluate", "--temperature", "-1"], "give 0 or more"),
        (["evaluate", "--temperature", "nan"], "give 0 or more"),
        (["evaluate", "--temperature", "1"], "give its --checkpoint"),
        (["evaluate", "--checkpoint", "x", "--words", "builtin"], "leave one of them out"),
        (["solve", "--words", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(given, said, capsys):
    assert main(given) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_keyboard_without_colours_marks_its_letters():
    state = State().after("crane", "cigar")
    plain, coloured = (keyboard(state, colours=colours).plain for colours in (False, True))

    assert all(f" {letter}{mark}" in plain for letter, mark in zip("crane", "gyyxx", strict=True))
    assert " q  w  ex" in plain
    assert "cg" not in coloured
