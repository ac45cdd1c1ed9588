"""A language model: read tensor by tensor, random, or with adapters.

A package's file is converted once.
"""

import json
import pickle

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_unified.models.causal_lm import weights
from lightning_unified.models.causal_lm.weights import adapt, build_language_model, load_language_model
from lightning_unified.models.pretrained import gguf, streaming
from lightning_unified.models.pretrained.adapters import adapter_layers
from lightning_unified.models.pretrained.architecture import architecture_of, blocks_of
from tests.support.lanes import first_cells

pytest.importorskip("transformers")
QWEN = {
    "model_type": "qwen2", "vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
IDS = torch.arange(12)[None]


@pytest.fixture
def saved(tmp_path):
    """Return a small Qwen2 and the folder that transformers has saved it in."""
    torch.manual_seed(0)
    model = build_language_model(QWEN)
    model.save_pretrained(tmp_path)
    return model.eval(), tmp_path


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def test_a_saved_model_is_read_as_it_was(saved):
    model, folder = saved

    assert torch.equal(logits(load_language_model(folder)), logits(model))


def test_weights_are_the_files_own_tensors_and_tied_ones_stay_one(saved, monkeypatch):
    given, read = [], streaming.read_tensor

    def remembered(descriptor, stored, **options):
        given.append(read(descriptor, stored, **options))
        return given[-1]

    monkeypatch.setattr(streaming, "read_tensor", remembered)
    model = load_language_model(saved[1])

    assert {one.data_ptr() for one in model.parameters()} == {tensor.data_ptr() for tensor in given}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_can_be_kept_in_half_the_bytes(saved):
    assert {one.dtype for one in load_language_model(saved[1], dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_files_that_do_not_belong_together_are_refused(saved):
    _, folder = saved
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 3, "layer_types": None}))

    with pytest.raises(RuntimeError, match=r"12 of 38 parameters are missing.*model\.layers\.2"):
        load_language_model(folder)


def test_a_model_is_built_again_from_what_it_says_of_itself(saved):
    again = build_language_model(architecture_of(saved[0]))

    assert [tuple(one.shape) for one in again.parameters()] == [tuple(one.shape) for one in saved[0].parameters()]
    assert len(blocks_of(again)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "float16"}, "dtype='float16' is not offered"), ({"attention": "slow"}, "attention='slow'")],
)
def test_what_transformers_cannot_build_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build_language_model(QWEN, **changes)
    with pytest.raises(ValueError, match="model_type='qwen9'"):
        build_language_model({"model_type": "qwen9"})


def test_young_adapters_change_nothing_and_alone_are_trained_in_float32(saved):
    pytest.importorskip("peft")
    model = load_language_model(saved[1], dtype="bfloat16")
    before = logits(model)
    adapt(model, rank=4, alpha=8.0)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}

    assert torch.equal(logits(model), before)
    assert all(".lora_" in name and one.dtype == torch.float32 for name, one in trained.items())
    assert len(trained) == 2 * 7 * 2  # two matrices beside seven layers of two blocks, none beside the head


def passed(model, *, autocast):
    """Return the gradients of a forward pass, and the bytes that it keeps."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, use_cache=False).logits.float().square().mean()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}, sum(kept.values())


@pytest.mark.parametrize("dora", [False, True])
@first_cells(1, "autocast", [False, True])
def test_gradients_of_adapters_are_pefts_and_lora_keeps_less(saved, dora, autocast):
    pytest.importorskip("peft")
    model = load_language_model(saved[1], dtype="bfloat16").train()
    adapt(model, rank=4, alpha=8.0, dora=dora)
    for name, one in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
    ours, kept = passed(pickle.loads(pickle.dumps(model)), autocast=autocast)
    for layer in adapter_layers(model):
        vars(layer).pop("_cast_input_dtype", None)
    plain, kept_by_peft = passed(model, autocast=autocast)

    assert all(torch.equal(ours[name], one) for name, one in plain.items())
    if autocast and not dora:
        assert kept < kept_by_peft


def test_a_target_that_is_not_there_is_refused_with_those_that_are(saved):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"lora_targets=\['query'\].*down_proj, gate_proj, k_proj"):
        adapt(load_language_model(saved[1]), rank=4, alpha=8.0, targets=["query"])


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Provide a package's file; return the models' folder and the number of conversions."""
    file, calls = tmp_path / "model.gguf", []
    file.write_bytes(b"12345")

    def convert(_, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "gguf_file", lambda name: file)
    monkeypatch.setattr(gguf, "_convert", convert)
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models", calls


def test_a_packages_file_is_converted_once(packaged):
    folder, calls = packaged
    found = gguf.converted("smollm2-135m")

    assert found == gguf.converted("smollm2-135m") == folder / "smollm2-135m-5"
    assert len(calls) == 1
    assert [one.name for one in folder.iterdir()] == [found.name]


def test_a_conversion_that_fails_leaves_nothing_behind(packaged, monkeypatch):
    def fail(_, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("the disk is full")

    monkeypatch.setattr(gguf, "_convert", fail)
    with pytest.raises(OSError, match="the disk is full"):
        gguf.converted("smollm2-135m")
    assert list(packaged[0].iterdir()) == []


@pytest.mark.slow
def test_smollm2_comes_with_its_template_and_answers():
    from transformers import AutoTokenizer

    from lightning_unified.models.pretrained.chat import ChatTokenizer

    try:
        folder = weights.find_language_model("smollm2-135m")
    except (FileNotFoundError, RuntimeError) as error:
        pytest.skip(str(error))
    chat, model = ChatTokenizer.from_folder(folder), load_language_model(folder).eval()
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([chat.prompt(asked)])
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(asked, add_generation_prompt=True)
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]

    assert ids[0].tolist() == list(theirs["input_ids"])
    assert "Paris" in chat.decode(answer.tolist())
    assert answer[-1] == chat.end_id == chat.backend.token_to_id("<|im_end|>")
