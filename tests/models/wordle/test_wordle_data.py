"""Wordle as batches: labels at completions only, and two phases.

Prompts end in the last column. A run continues from one saved place.
"""

import itertools
import pickle
import subprocess
import sys

import pytest
import torch

from lightning_unified.models.wordle.data import wordle_games
from lightning_unified.models.wordle.data.wordle_data import WordleData
from lightning_unified.models.wordle.prompts import messages

SIZES = {
    "batch_size": 2, "sft_batch_size": 4, "sft_steps": 3, "grpo_steps": 4, "vocab_size": 320, "prompt_length": 420,
    "text_length": 500,
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return a file of few words, for which games are quick."""
    from lightning_unified.models.wordle.game.words import read_words

    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(read_words("builtin").answers[:60]))
    return str(path)


@pytest.fixture
def build(words):
    return lambda **changes: WordleData(**{"words": words, **SIZES, **changes})


@pytest.fixture(scope="module")
def data(words):
    return WordleData(words=words, **SIZES)


def batches(data, count):
    return list(itertools.islice(iter(data.train_dataloader()), count))


def test_a_trace_is_scored_at_its_completion_and_the_end_of_the_turn(data):
    batch = batches(data, 1)[0]
    scored = batch["labels"] != -100

    assert torch.equal(batch["labels"][scored], batch["tokens"][scored])
    text = data.chat.decode(batch["tokens"][0][scored[0]].tolist())
    assert text.startswith("<think>") and text.endswith("</guess>")
    assert (batch["labels"].amax(1) > 0).all() and (batch["labels"] == data.chat.end_id).sum() == 4


def test_a_prompt_ends_in_the_last_column_and_its_number_is_its_state(data):
    batch = batches(data, 4)[3]
    rows = zip(batch["prompt"], batch["prompt_mask"], batch["example"].tolist(), strict=True)

    assert batch["prompt_mask"][:, -1].all()
    for ids, mask, number in rows:
        state = data.examples[number].state
        assert ids[mask].tolist() == data.chat.prompt(messages(state))


def test_traces_come_first_and_never_again(data):
    loader = data.train_dataloader()
    epochs = [["labels" in batch for batch in loader] for _ in range(2)]

    assert epochs == [[True] * 3 + [False] * 4, [False] * 7]


def test_a_resumed_loader_gives_the_batches_that_were_left(build):
    whole = batches(build(), 7)
    for place in (2, 5):
        first = build().train_dataloader()
        list(itertools.islice(iter(first), place))
        again = build().train_dataloader()
        again.load_state_dict(first.state_dict())

        for batch, expected in zip(again, whole[place:], strict=True):
            assert all(torch.equal(batch[name], values) for name, values in expected.items())


def test_other_words_are_another_order(build):
    loader = build().train_dataloader()
    list(itertools.islice(iter(loader), 2))
    with pytest.raises(ValueError, match="in an order that this loader does not have"):
        build(seed=1).train_dataloader().load_state_dict(loader.state_dict())


def test_each_batch_of_prompts_comes_as_often_as_there_are_iterations(build):
    found = batches(build(inner_iterations=2), 7)[3:]

    assert [int(batch["iteration"]) for batch in found] == [0, 1, 0, 1]
    assert torch.equal(found[0]["example"], found[1]["example"])
    assert not torch.equal(found[1]["example"], found[2]["example"])


def test_no_state_is_asked_twice_in_the_first_epoch(build):
    few, many = build(grpo_steps=4), build(grpo_steps=150)
    asked = torch.cat([batch["example"] for batch in batches(many, 153) if "prompt" in batch]).tolist()

    assert len(set(asked)) == len(asked) == 300
    assert len(few.examples) < 300  # of one round
    assert many.examples[:20] == few.examples[:20]


def test_a_teacher_that_wins_no_game_is_refused(build, monkeypatch):
    monkeypatch.setattr(wordle_games, "traces", lambda *_, **__: iter(()))

    with pytest.raises(ValueError, match="the teacher won no game"):
        build().setup("fit")


def test_no_held_out_secret_is_trained_on(build, monkeypatch):
    asked, play = [], wordle_games.traces

    def remembered(words, secrets, **settings):
        asked.append(set(secrets))
        return play(words, secrets, **settings)

    monkeypatch.setattr(wordle_games, "traces", remembered)
    data = build()
    data.setup()
    *training, validation = asked

    assert validation == set(data.held_out)
    assert len(data.held_out) == 6
    assert all(not secrets & validation and len(secrets) == 54 for secrets in training)


def test_ranks_share_a_batch(build):
    class Trainer:
        world_size, global_rank, overfit_batches = 2, 0, 0

    whole, parts = batches(build(), 4), []
    for rank in range(2):
        own = build()
        own.trainer = Trainer()
        own.trainer.global_rank = rank
        own._processed_batches = lambda: 0
        parts.append(batches(own, 4))

    assert torch.equal(torch.stack([part[3]["example"] for part in parts], 1).flatten(), whole[3]["example"])
    assert torch.equal(torch.stack([part[0]["tokens"] for part in parts], 1).flatten(0, 1), whole[0]["tokens"])


def test_examples_have_the_shapes_of_real_batches_and_read_nothing(data, words):
    nowhere = WordleData(words="/nowhere", pretrained="/nowhere", **SIZES)
    real = batches(data, 4)

    def shapes(batch):
        return {name: (tuple(values.shape), values.dtype) for name, values in batch.items()}

    assert shapes(nowhere.example_phases()["imitation"]) == shapes(real[0])
    assert shapes(nowhere.example_batch()) == shapes(real[3])
    assert shapes(nowhere.example_validation_batch()) == shapes(next(iter(data.val_dataloader())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 40}, r"data\.prompt_length=40: a prompt has \d+ tokens"),
        ({"text_length": 60}, r"data\.text_length=60: a trace has \d+ tokens"),
    ],
)
def test_lengths_that_do_not_hold_what_there_is_are_refused(build, changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes).setup("fit")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("sft_steps", -1), ("grpo_steps", True), ("prefetch_factor", 0), ("sft_batch_size", 0)],
)
def test_a_number_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"data\.{name}={value}; it must be a whole number of at least"):
        WordleData(**{name: value})


def test_the_first_batch_holds_the_longest_rows_by_which_memory_is_planned(data):
    first, rows = batches(data, 1)[0], data.rows[0]._rows(0)
    scored = first["labels"] != -100
    widths = [(row["tokens"] != data.chat.pad_id).sum() for row in map(rows.__getitem__, range(len(rows)))]

    assert (first["tokens"] != data.chat.pad_id).sum(1).amax() == max(widths)
    assert scored.sum(1).amax() == max(len(ids) for ids in rows._completions)


@pytest.mark.slow
def test_a_spawned_worker_gets_all_it_needs_without_lightning(data):
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); print('lightning' in sys.modules, 'transformers' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(data.rows[0]), capture_output=True, check=True
    )

    assert found.stdout.split() == [b"False", b"False"]


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    from lightning_unified.data.tokenizer import train_tokenizer

    backend = train_tokenizer(["a word"], vocab_size=300)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no chat template; give an instruct model"):
        WordleData(**{**SIZES, "pretrained": str(tmp_path)}).setup("fit")
