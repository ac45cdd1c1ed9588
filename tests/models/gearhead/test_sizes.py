"""Sizes and what they count."""

import pytest
import torch

from lightning_unified.models.gearhead.network import GearHeadNetwork
from lightning_unified.models.gearhead.sizes import PRESETS, GearHeadConfig, preset

# the 34m and 118m counts are those of the published sizes
COUNTS = {
    "gearhead-34m": 34_083_904,
    "gearhead-118m": 118_934_080,
    "gearhead-small": 2_638_656,
    "gearhead-text": 2_566_400,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_the_parameters_stated_beside_it(name):
    with torch.device("meta"):
        network = GearHeadNetwork(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == PRESETS[name].parameters == COUNTS[name]


def test_the_head_count_does_not_change_the_parameters():
    assert preset("gearhead-34m", heads=12).parameters == 34_083_904


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"heads=5 does not divide width=8; valid head counts: 1, 2, 4, 8\."):
        preset("gearhead-small", width=8, heads=5)
    assert preset("gearhead-small", width=8, heads=4).heads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0 is not a size"),
        ({"dropout": 1.0}, "dropout=1.0 is not a share"),
        ({"num_error_codes": 5}, "num_error_codes=5; it is 10000"),
        ({"num_diagnoses": 5}, "num_diagnoses=5; it is 64"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        preset("gearhead-small", **change)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean gearhead-34m"):
        preset("gearhead-43m")


def test_none_leaves_the_presets_own_size():
    assert preset("gearhead-small", width=None) == PRESETS["gearhead-small"]


def test_only_the_text_preset_is_a_text_model():
    assert [name for name in PRESETS if PRESETS[name].is_text_model] == ["gearhead-text"]


def test_fields_of_another_model_are_refused():
    with pytest.raises(ValueError, match="does not describe a GearHead"):
        GearHeadConfig.from_mapping({"color": "red"})
