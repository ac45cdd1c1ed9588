"""Rule R3: which precision runs on which device and torch, and which needs a scaler."""

from types import SimpleNamespace

import pytest
import torch

from lightning_unified.errors import PrecisionError
from lightning_unified.precision import Platform, choose_precision, platform_of

NO_SCALER = ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")


def choose(requested, backend="cuda", native=True):
    return choose_precision(requested, platform=Platform(backend=backend, native_bf16=native))


@pytest.mark.parametrize(
    ("backend", "native", "expected"),
    [
        ("cpu", True, "32-true"),
        ("cuda", True, "bf16-mixed"),
        ("cuda", False, "32-true"),
        ("rocm", True, "bf16-mixed"),
        ("mps", True, "bf16-mixed"),
        ("mps", False, "bf16-mixed"),
        ("xpu", True, "bf16-mixed"),
    ],
)
def test_auto_is_bf16_where_it_is_native_or_saves_memory(backend, native, expected):
    choice = choose("auto", backend, native)

    assert (choice.precision, choice.scaler) == (expected, False)
    assert choice.reason


@pytest.mark.parametrize(
    ("backend", "scaler"), [("cuda", "cuda"), ("rocm", "cuda"), ("xpu", "xpu"), ("mps", "mps"), ("cpu", None)]
)
def test_fp16_comes_with_a_scaler_for_its_device_or_not_at_all(backend, scaler):
    if scaler is None:
        with pytest.raises(PrecisionError, match="use bf16-mixed or 32-true"):
            choose("16-mixed", backend)
        return
    assert choose("16-mixed", backend).scaler
    assert Platform(backend=backend, native_bf16=True).device_type == scaler


@pytest.mark.parametrize("requested", NO_SCALER)
@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "mps", "xpu"])
def test_no_other_precision_has_a_scaler(backend, requested):
    if (backend, requested) == ("mps", "64-true"):
        with pytest.raises(PrecisionError, match="Metal has no float64; use 32-true"):
            choose(requested, backend)
        return
    choice = choose(requested, backend)

    assert (choice.precision, choice.scaler, choice.reason) == (requested, False, "as asked")


@pytest.mark.parametrize(
    ("requested", "text"), [("fp8", "not known;.* choose one of"), ("bf16-mixd", "did you mean bf16-mixed")]
)
def test_an_unknown_name_is_refused_with_the_nearest(requested, text):
    with pytest.raises(PrecisionError, match=text):
        choose(requested)


@pytest.mark.parametrize(("short", "name"), [("bf16", "bf16-mixed"), ("fp16", "16-mixed"), (32, "32-true")])
def test_short_names_are_lightnings(short, name):
    assert choose(short).precision == name


@pytest.mark.parametrize(("chip", "native"), [("Apple M4", True), ("Apple M2", False)])
def test_a_mac_is_asked_for_its_chip(mac, chip, native):
    mac(chip, version="2.12.1")

    assert platform_of(torch.device("mps")) == Platform(backend="mps", native_bf16=native)


def test_a_cuda_device_under_hip_is_rocm(monkeypatch):
    properties = SimpleNamespace(
        gcnArchName="gfx1100", name="AMD Radeon RX 7900", total_memory=2**34, is_integrated=False
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = platform_of(torch.device("cuda", 0))

    assert (found.backend, found.native_bf16, found.device_type) == ("rocm", True, "cuda")
