"""Prompts of a user's own file: asked as they are, rewarded by their own games."""

import json

import pytest
import torch

from lightning_unified.models.wordle.data.own_prompts import read_prompts
from lightning_unified.models.wordle.data.wordle_data import WordleData
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import WordList, split_secrets
from lightning_unified.models.wordle.rewards import WordleTask

ANSWERS = ("crane", "slate", "trace", "brace", "grace", "plane", "place", "shale", "stale", "blade")
WORDS = WordList(answers=ANSWERS, guesses=ANSWERS)
SIZES = {
    "batch_size": 2, "sft_batch_size": 4, "sft_steps": 1, "grpo_steps": 3, "prompt_length": 420, "text_length": 500,
}  # fmt: skip
CHAT = [{"role": "user", "content": "Which word?"}]


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return path

    return write


def rows_of(*secrets, **more):
    return [{"prompt": f"Guess {number}.", "secret": secret, **more} for number, secret in enumerate(secrets)]


def test_the_state_follows_from_guesses_and_secret(written):
    history = [["SLATE", "S(x) L(x) A(\u2713) T(x) E(\u2713)"], ["brace", "\u2026"]]
    path = written(
        {"prompt": "a", "secret": "crane", "guesses": ["slate", "brace"]},
        {"prompt": "b", "secret": "CRANE", "past_guess_history": str(history)},
        {"prompt": CHAT, "secret": "crane"},
    )
    named, of_a_data_set, first = read_prompts(path, WORDS)

    assert named.state == State().after("slate", "crane").after("brace", "crane") == of_a_data_set.state
    assert (named.secret, of_a_data_set.secret) == ("crane", "crane")
    assert first.state == State()


def test_the_second_phase_asks_the_file_and_nothing_else(written, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(ANSWERS))
    train, held_out = split_secrets(WORDS, held_out_fraction=0.1, seed=0)
    rows = [*rows_of(*train[:4]), {"prompt": CHAT, "secret": train[4]}, *rows_of(*held_out)]
    data = WordleData(words=str(tmp_path / "words.txt"), prompts=str(written(*rows)), **SIZES)
    _, *asked = list(data.train_dataloader())
    texts = {
        number: data.chat.decode(ids[mask].tolist(), skip_special_tokens=False)
        for batch in asked
        for ids, mask, number in zip(batch["prompt"], batch["prompt_mask"], batch["example"].tolist(), strict=True)
    }

    assert texts == {**{number: f"Guess {number}." for number in range(4)}, 4: data.chat.render(CHAT)}
    assert [one.secret for one in data.examples] == list(train[:5])
    assert "5 prompts of " in data.describe_line()
    assert (
        "5 without guesses, whose rewards know no feedback, 1 left out, whose secret is held out"
        in data.describe_line()
    )


def test_an_answer_continues_the_thought_that_its_prompt_opens(written, patterns, words):
    secret = words.answers[0]
    path = written(*rows_of(secret), {"prompt": "Guess.\n<think>", "secret": secret})
    examples = WordleData(words="builtin", prompts=str(path), **SIZES).examples
    task = WordleTask()
    task.take(words, patterns=patterns, examples=examples)
    closes = f"out</think>\n<guess>{secret}</guess>"
    paid = task.rewards(torch.tensor([0, 1, 1]), [closes, closes, f"<think>{closes}"])["solved"]

    assert paid.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "prompts.jsonl:1: no secret; give rows such as"),
        ({"prompt": "a", "secret": "['ERROR']"}, "is no answer of the 10 words"),
        ({"prompt": 3, "secret": "crane"}, "prompt=3; it must be a text, or a list of messages"),
        ({"prompt": "a", "secret": "crane", "guesses": ["zzzzz"]}, "the guess 'zzzzz' is none of the words"),
        ({"prompt": "a", "secret": "crane", "guesses": ["crane"]}, "the game is over after the guess 'crane'"),
        ({"prompt": "a", "secret": "crane", "guesses": [3]}, r"guesses=\[3\]; give a list of words"),
        ({"prompt": "a", "secret": "crane", "past_guess_history": "crane"}, "guesses='crane'; give a list of words"),
    ],
)
def test_a_row_that_makes_no_prompt_is_refused_with_its_line(written, row, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(written(row), WORDS)


def test_a_file_that_is_missing_or_empty_is_refused(written, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.prompts: there is no file"):
        read_prompts(tmp_path / "none.jsonl", WORDS)
    with pytest.raises(ValueError, match="has no rows"):
        read_prompts(written(), WORDS)
