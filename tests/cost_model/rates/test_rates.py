"""Speeds of a machine: measured if it is present, tabled if not, each with its source."""

import json
from functools import partial

import pytest
import torch

from lightning_unified.cost_model.rates import (
    Alignment,
    Rates,
    brief_rates,
    measure_alignment,
    measure_rates,
    tabled_rates,
    typical_rates,
)
from lightning_unified.cost_model.rates.measured import _launch, verdict
from lightning_unified.hardware.simulated.profiles import PROFILES


@pytest.fixture(scope="module")
def here():
    return measure_rates("cpu")


def test_a_cpu_is_measured_in_all_that_a_plan_needs(here):
    assert set(here.flops) == {"float32", "bfloat16"}
    assert min(*here.flops.values(), here.bandwidth, here.launch) > 0
    assert here.kernel == 0
    assert all(source.startswith(("measured on", "part of", "judgement")) for source in here.sources.values())


@pytest.mark.slow
def test_of_a_machine_in_no_table_a_run_measures_what_it_multiplies_in():
    brief = brief_rates("cpu", name="a CPU", dtypes=["bfloat16"])

    assert set(brief.flops) == {"float32", "bfloat16"}
    assert 1e8 < brief.flops["float32"] < 1e14
    assert brief.sources["flops"].startswith("measured briefly on a CPU")


def test_of_a_machine_in_the_tables_a_run_measures_only_the_host(monkeypatch):
    monkeypatch.setattr("lightning_unified.cost_model.rates.measured._launch", lambda _: 7e-5)
    brief, tabled = brief_rates("cuda", name="NVIDIA H200", dtypes=["bfloat16"]), tabled_rates("NVIDIA H200")

    assert (brief.flops, brief.bandwidth, brief.launch) == (tabled.flops, tabled.bandwidth, 7e-5)
    assert (brief.sources["flops"][:6], brief.sources["launch"][:8]) == ("table:", "measured")


def test_a_large_product_is_predicted_within_an_order_of_magnitude(here):
    """A wrong unit or a factor of the sizes forgotten is off by more."""
    assert 1e8 < here.flops["float32"] < 1e14
    assert 1e8 < here.bandwidth < 1e13
    assert 1e-7 < here.launch < 1e-2


@pytest.mark.slow
def test_measuring_leaves_generators_and_settings_as_they_were():
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        measure_rates("cpu")

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.gpu
@pytest.mark.parametrize(
    "measure",
    [
        measure_rates,
        partial(brief_rates, name="NVIDIA H200", dtypes=["bfloat16"]),
        partial(brief_rates, name="an unknown card", dtypes=["bfloat16"]),
        measure_alignment,
    ],
)
def test_measuring_leaves_the_generator_of_a_gpu_as_it_was(measure):
    state = torch.cuda.get_rng_state()
    measure("cuda")

    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_measuring_the_host_draws_no_random_number():
    state = torch.get_rng_state()
    _launch(torch.device("cpu"))

    assert torch.equal(torch.get_rng_state(), state)


def test_measured_rates_survive_being_saved(here):
    assert Rates(**json.loads(json.dumps(here.to_dict()))) == here


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_simulated_machine_has_rates_that_say_they_are_tabled(name):
    rates = tabled_rates(name)

    assert rates.sources["flops"].startswith("table: ")
    assert {"float32", "bfloat16", "float16"} <= set(rates.flops)


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("NVIDIA H200", "h200"),
        ("Apple M2", "m2-16gb"),
        ("Apple M4 Pro", "m4-pro-48gb"),
        ("NVIDIA GB10", "gb10-128gb"),
        ("AMD Radeon 8060S Graphics", "strix-halo-128gb"),
        ("NVIDIA GeForce RTX 3060", "rtx3060-12gb"),
    ],
)
def test_a_device_is_found_by_the_name_its_driver_gives(name, same_as):
    assert tabled_rates(name).flops == tabled_rates(same_as).flops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "Apple M2 Ultra",
        "Orin Nano",
        "A Thing of 2031",
    ],
)
def test_a_machine_that_only_shares_a_name_is_not_guessed(name):
    assert tabled_rates(name) is None


def test_memory_of_another_speed_is_recognized_by_the_longer_name():
    assert tabled_rates("NVIDIA A100-SXM4-80GB").bandwidth > tabled_rates("NVIDIA A100-SXM4-40GB").bandwidth


def test_a_machine_that_emulates_bf16_is_slower_in_it():
    rates = tabled_rates("m1-8gb")

    assert rates.flops["bfloat16"] < rates.flops["float32"]


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "mps"])
def test_a_device_of_unknown_name_has_rates_that_call_themselves_a_judgement(backend):
    assert all(source.startswith("judgement") for source in typical_rates(backend).sources.values())


def test_an_unknown_backend_has_no_typical_rates():
    with pytest.raises(ValueError, match="backend='tpu' has no rates; there are cpu, cuda, rocm, mps"):
        typical_rates("tpu")


def test_rates_without_a_speed_are_refused():
    with pytest.raises(ValueError, match=r"rates of x: .*speeds must be positive, with one for float32"):
        Rates(name="x", flops={"bfloat16": 1e12}, bandwidth=1e9, launch=0, kernel=0, part=0)


def test_alignment_is_measured_on_neighbouring_sizes_and_survives_being_saved():
    alignment = measure_alignment("cpu")

    assert set(alignment.without) == {"multiple of 8", "multiple of 64", "power of two"}
    assert {512, 504, 509, 1024, 1016, 1021} <= set(alignment.seconds_per_row)
    assert alignment.gain >= 1
    assert Alignment.from_dict(json.loads(json.dumps(alignment.to_dict()))) == alignment


@pytest.mark.parametrize(
    ("of_64", "of_8", "expected"),
    [
        ([1.2, 1.3, 1.4], [1.0, 1.0, 1.0], (64, 1.3)),
        ([1.3, 1.3, 0.9], [1.1, 1.2, 1.3], (8, 1.2)),
        ([1.3, 1.3, 0.9], [1.3, 1.3, 1.02], (1, 1.0)),
    ],
)
def test_alignment_pays_only_if_all_neighbours_show_it(of_64, of_8, expected):
    assert verdict({"multiple of 64": of_64, "multiple of 8": of_8}) == expected


def test_what_alignment_gave_is_said_in_numbers():
    alignment = Alignment(
        device="NVIDIA H200",
        dtype="bfloat16",
        seconds_per_row={512: 1e-7},
        without={"multiple of 8": 1.52, "multiple of 64": 1.01, "power of two": 1.0},
        multiple=8,
        gain=1.52,
        source="made by hand",
    )

    assert alignment.describe() == (
        "on NVIDIA H200 sizes that are multiples of 8 pay; time a row without each property, relative to with it: no multiple of 8 1.52, "
        "no multiple of 64 1.01, no power of two 1.00 (bfloat16)"
    )
