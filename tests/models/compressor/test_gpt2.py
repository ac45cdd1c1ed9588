"""A reader with GPT-2's weights computes the vectors of transformers from the same files."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models

from lightning_unified.models.compressor import Compressor
from lightning_unified.models.compressor.inference import checkpoint
from lightning_unified.models.compressor.network import gpt2
from lightning_unified.models.compressor.network.pretrained import load_tokenizer

SIZES = {"vocabulary": 300, "positions": 64, "width": 32, "layers": 2, "heads": 4, "feed_forward": 128}
WORDS = Tokenizer(models.WordLevel({f"w{index}": index for index in range(300)}, unk_token="w0"))


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    names = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=300, initializer_range=0.3, **names)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(theirs, tmp_path):
    """Return a folder of random weights, saved as transformers saves a downloaded GPT-2."""
    theirs.save_pretrained(tmp_path)
    WORDS.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def build(folder, **changes):
    given = {"preset": "compressor-tiny", "reading": "copy", "pretrained": str(folder), **SIZES, **changes}
    return Compressor(**given).eval()


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("prefixed", [True, False], ids=["with a head", "without"])
@torch.no_grad()
def test_the_reader_computes_what_transformers_does(theirs, folder, prefixed):
    if not prefixed:  # as the hub stores GPT-2
        (folder / "model.safetensors").unlink()
        theirs.transformer.save_pretrained(folder)
    reader = build(folder).codec.reader
    ids = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(2))
    ours = reader(reader.embed(ids)) @ reader.head_weight.T

    torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert ours.std() > 0.5


def test_mask_and_separator_begin_among_the_tokens(folder):
    codec = build(folder).codec

    assert torch.allclose(codec.mask_embedding, codec.reader.head_weight.mean(0))
    assert torch.equal(codec.separator, codec.reader.head_weight[198])


def test_a_checkpoint_and_a_plan_need_no_files(folder, monkeypatch, tmp_path):
    model = build(folder)
    model.attach_tokenizer(load_tokenizer(str(folder)))
    saved = {"state_dict": model.state_dict(), "global_step": 3, "hyper_parameters": dict(model.hparams)}
    model.on_save_checkpoint(saved)
    torch.save(saved, tmp_path / "m.ckpt")
    monkeypatch.setattr(gpt2, "find_model", lambda *_, **__: pytest.fail("the files were read"))
    again = checkpoint.load(tmp_path / "m.ckpt", device="cpu")

    assert all(torch.equal(again.state_dict()[name], values) for name, values in model.state_dict().items())
    with torch.device("meta"):
        assert build("/nowhere").codec.reader.head_weight.is_meta


def test_a_tokenizer_learnt_from_the_texts_is_refused(folder):
    other = Tokenizer(models.WordLevel({f"w{index}": index for index in range(200)}, unk_token="w0"))
    with pytest.raises(ValueError, match=r"has 300 tokens of its own, the tokenizer given 200; set data\.pretrained="):
        build(folder).attach_tokenizer(other)


def test_files_that_are_no_gpt2_of_these_sizes_are_refused(folder):
    with pytest.raises(ValueError, match=r"other sizes than the reader; set model\.layers=2 model\.feed_forward=128"):
        build(folder, layers=3, feed_forward=64)
    change(folder, activation_function="relu")
    with pytest.raises(ValueError, match="is a gpt2 with relu; the reader is a gpt2 with gelu_new"):
        build(folder)
    change(folder, activation_function="gelu_new", model_type="llama")
    with pytest.raises(ValueError, match="is a llama with gelu_new"):
        build(folder)
    with pytest.raises(ValueError, match="this preset reads with smollm2-135m"):
        Compressor(preset="compressor-smollm2", pretrained=str(folder), load_pretrained=False)


def test_files_without_all_weights_are_refused(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    stored = safetensors.load_file(folder / "model.safetensors")
    stored.pop("transformer.h.1.mlp.c_fc.bias")
    safetensors.save_file(stored, folder / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"1 of 28 parameters are missing.*blocks\.1\.inner\.bias"):
        build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        build(folder)
