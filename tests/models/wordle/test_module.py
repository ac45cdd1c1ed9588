"""Wordle under a Trainer: two phases in one fit, and refusals before the first step.

A checkpoint is enough to play.
"""

import json

import lightning as L
import pytest
import torch

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.wordle import WordleData
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import read_words
from lightning_unified.models.wordle.module import Wordle
from lightning_unified.models.wordle.play.callback import PlayWordle, shown
from lightning_unified.models.wordle.play.games import Game
from lightning_unified.models.wordle.play.player import ModelPlayer
from lightning_unified.models.wordle.presets import PRESETS
from tests.support.lanes import first_cells

pytest.importorskip("transformers")
pytest.importorskip("peft")
TINY = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 640, "tie_word_embeddings": True,
}  # fmt: skip
STEPS = {"sft_steps": 2, "grpo_steps": 3}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Return a file of few words."""
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(read_words("builtin").answers[:60]))
    return str(path)


@pytest.fixture
def data(few):
    sizes = {"batch_size": 2, "sft_batch_size": 4, "vocab_size": 320, "prompt_length": 420, "text_length": 500}
    return lambda **changes: WordleData(**{"words": few, **sizes, **STEPS, **changes})


def build(**changes):
    torch.manual_seed(0)
    settings = {"architecture": TINY, "lora_rank": None, "group_size": 2, "max_new_tokens": 6, "sft_steps": 2}
    return Wordle(**{**settings, **changes})


def fit(module, data, folder, *callbacks, steps=4, resume=None, **settings):
    trainer = L.Trainer(
        **{
            "default_root_dir": folder, "max_steps": steps, "accelerator": "cpu", "logger": False, "limit_val_batches": 0,
            "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
            "callbacks": list(callbacks), **settings,
        }
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
    return trainer


def weights(module):
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_it_states(name):
    with torch.device("meta"):
        module = Wordle(preset=name, lora_rank=None)

    assert sum(one.numel() for one in module.parameters()) == PRESETS[name].parameters


def test_one_fit_imitates_and_is_then_rewarded_and_both_are_judged_by_games(data, tmp_path):
    play = PlayWordle(games=3, batch_size=2, samples=1, directory=str(tmp_path / "games"))
    validated = {"limit_val_batches": 1, "val_check_interval": 4, "check_val_every_n_epoch": None}
    trainer = fit(build(), data(), tmp_path, play, **validated)
    records = {path.name: json.loads(path.read_text()) for path in (tmp_path / "games").glob("*.json")}

    assert {"train/sft_loss", "train/loss", "train/reward_solved", "val/loss", "val/win_rate", "val/valid"} <= set(
        trainer.callback_metrics
    )
    assert {name: (one["global_step"], one["games"]) for name, one in records.items()} == {
        "sft-step=2.json": (2, 3),
        "val-step=4.json": (4, 3),
    }
    assert (tmp_path / "games" / "val-step=4.txt").read_text() == f"{play.shown[0]}\n"
    assert play.shown[0].startswith("secret: ")


@first_cells(1, "place", [1, 3], ids=["imitation", "reinforcement"])
def test_a_run_resumed_in_either_phase_ends_as_one_that_was_never_stopped(data, tmp_path, place):
    torch.manual_seed(1)
    whole = build()
    fit(whole, data(), tmp_path, RunCheckpoint(tmp_path / "a", every_n_steps=place, keep=9, monitor=None))
    again = build()
    fit(
        again,
        data(),
        tmp_path,
        RunCheckpoint(tmp_path / "b", monitor=None),
        resume=tmp_path / f"a/step_{place:06d}.ckpt",
    )

    assert torch.equal(weights(again), weights(whole))


@pytest.mark.slow
def test_the_temperature_falls_on_a_straight_line_over_the_second_phase(data, tmp_path):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(module.temperature)

    fit(build(temperature=1.0, temperature_end=0.5), data(), tmp_path, Watch(), steps=5)

    assert seen == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5])


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a model of the tiny architecture, as somebody's own weights."""
    torch.manual_seed(5)
    build_language_model(TINY).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_adapters_are_saved_without_the_weights_that_were_read_and_play_beside_them(data, tmp_path, folder):
    settings = {"architecture": None, "pretrained": folder, "lora_rank": 2, "sft_learning_rate": 0.1}
    module = build(**settings)
    fit(module, data(), tmp_path, RunCheckpoint(tmp_path, every_n_steps=4, monitor=None))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    player = ModelPlayer(tmp_path / "last.ckpt", device="cpu")
    states = [State(), State().after("crane", "slate")]

    assert {name.split(".lora_")[-1][0] for name in saved["state_dict"]} == {"A", "B"}
    assert player.answers(states) == ModelPlayer(module).answers(states)
    assert torch.equal(weights(player.module), weights(module))
    assert player.words.answers == data().words.answers
    assert player.held_out == data().held_out


@pytest.mark.slow
def test_random_weights_are_saved_whole_and_need_no_preset(data, tmp_path):
    module = build()
    fit(module, data(), tmp_path, RunCheckpoint(tmp_path, every_n_steps=4, monitor=None))

    assert torch.equal(weights(ModelPlayer(tmp_path / "last.ckpt", device="cpu").module), weights(module))


def test_a_player_keeps_its_cache_from_turn_to_turn_until_it_is_released(data, tmp_path):
    module = build()
    fit(module, data(), tmp_path, steps=1)
    player = ModelPlayer(module)
    player.answers([State()])
    kept = player._sampler.cache_bytes
    player.release()

    assert kept > 0
    assert player._sampler.cache_bytes == 0


def test_a_player_draws_the_same_answers_again_and_no_number_of_anybody_else(data, tmp_path):
    module = build()
    fit(module, data(), tmp_path, steps=1)
    before = torch.get_rng_state()
    first, again = (ModelPlayer(module, temperature=1.0).answers([State()] * 3) for _ in range(2))

    assert first == again
    assert len(set(first)) > 1
    assert torch.equal(torch.get_rng_state(), before)


def test_the_temperature_of_a_player_may_change_between_games(data, tmp_path):
    module = build()
    fit(module, data(), tmp_path, steps=1)
    player, greedy = ModelPlayer(module, temperature=1.0), ModelPlayer(module)
    player.answers([State()])
    player.temperature = 0.0

    assert player.answers([State()] * 2) == greedy.answers([State()] * 2)


def test_games_side_by_side_are_answered_as_one_by_one(data, tmp_path):
    module = build(sft_learning_rate=0.01)
    fit(module, data(), tmp_path, steps=2)
    states = [State(), State().after("crane", "slate"), State().after("slate", "slate")]

    together, alone = ModelPlayer(module, rows=3), ModelPlayer(module, rows=1)
    assert together.answers(states) == [answer for state in states for answer in alone.answers([state])]


def test_a_checkpoint_of_no_step_does_not_play(data, tmp_path):
    module = build()
    trainer = fit(module, data(), tmp_path, max_steps=0)
    trainer.save_checkpoint(tmp_path / "untrained.ckpt")
    with pytest.raises(RuntimeError, match="it would guess at random"):
        ModelPlayer(tmp_path / "untrained.ckpt")


def test_the_largest_batch_is_that_of_a_first_step(data):
    module, found = build(), data()
    module.task.take(found.words, patterns=found.patterns, examples=found.examples)
    module.identity.attach(found.chat, vocabulary=320)
    prompts = list(found.train_dataloader())[2]
    largest, real = module.largest_batch(found.example_batch()), module.prepare_batch(prompts)

    def shapes(batch):
        return {
            name: (values.shape, values.dtype) for name, values in batch.items() if isinstance(values, torch.Tensor)
        }

    assert shapes(largest) == shapes(real)
    assert module.generations(prompts) == module.generations(real) == {
        "rows": 4, "prompts": 2, "prompt": 420, "new": 6
    }  # fmt: skip
    assert module.generations(found.example_phases()["imitation"]) == {}


@pytest.mark.parametrize(
    ("changes", "of_data", "message"),
    [
        ({"architecture": {**TINY, "vocab_size": 280}}, {}, r"tokenizer has \d+ tokens, the model's vocabulary is 280"),
        (
            {"architecture": {**TINY, "max_position_embeddings": 425}},
            {},
            "data.prompt_length=420 and model.max_new_tokens=6",
        ),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused_before_the_first_step(data, tmp_path, changes, of_data, message):
    with pytest.raises(ValueError, match=message):
        fit(build(**changes), data(**of_data), tmp_path)


def test_another_tokenizer_than_the_checkpoints_is_refused(data):
    module = build()
    module.identity.attach(data().chat, vocabulary=320)
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        module.identity.attach(data(vocab_size=300).chat, vocabulary=320)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="preset='wordle-tini' is not offered; did you mean wordle-tiny"):
        Wordle(preset="wordle-tini")


def test_games_need_a_module_that_plays(tmp_path):
    with pytest.raises(ValueError, match="PlayWordle needs a Wordle module"):
        PlayWordle().setup(L.Trainer(logger=False, accelerator="cpu"), L.LightningModule(), "fit")


def test_a_game_is_shown_with_what_was_written_and_its_marks():
    state = State().after("crane", "slate").after("slate", "slate")
    text = shown(Game(secret="slate", state=state, answers=("<think>a\n</think>", "b")))

    assert text.splitlines() == [
        "secret: slate",
        "  <think>a </think>",
        "  b",
        "  crane  ··!·!",
        "  slate  !!!!!",
        "  won",
    ]
