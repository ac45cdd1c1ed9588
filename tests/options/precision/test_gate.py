"""Rule R3: which precision runs on which device and torch, and which needs a scaler."""

from types import SimpleNamespace

import pytest
import torch

from lightning_unified.errors import PrecisionError
from lightning_unified.precision import Platform, choose_precision, platform_of

NO_SCALER = ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")


def choose(requested, backend="cuda", native=True, torch_version=(2, 13)):
    return choose_precision(
        requested, platform=Platform(backend=backend, native_bf16=native, torch_version=torch_version)
    )


@pytest.mark.parametrize(
    ("backend", "native", "version", "expected"),
    [
        ("cpu", True, (2, 13), "32-true"),
        ("cuda", True, (2, 13), "bf16-mixed"),
        ("cuda", False, (2, 13), "32-true"),
        ("rocm", True, (2, 13), "bf16-mixed"),
        ("mps", True, (2, 13), "bf16-mixed"),
        ("mps", False, (2, 13), "bf16-mixed"),
        ("mps", False, (2, 5), "32-true"),
        ("xpu", True, (2, 13), "bf16-mixed"),
    ],
)
def test_auto_is_bf16_where_it_is_native_or_saves_memory(backend, native, version, expected):
    choice = choose("auto", backend, native, version)

    assert (choice.precision, choice.scaler) == (expected, False)
    assert choice.reason


@pytest.mark.parametrize(
    ("backend", "version", "scaler"),
    [
        ("cuda", (2, 11), "cuda"),
        ("cuda", (2, 13), "cuda"),
        ("rocm", (2, 11), "cuda"),
        ("rocm", (2, 13), "cuda"),
        ("xpu", (2, 11), "xpu"),
        ("xpu", (2, 13), "xpu"),
        ("mps", (2, 6), None),
        ("mps", (2, 7), None),
        ("mps", (2, 8), "mps"),
        ("mps", (2, 12), "mps"),
        ("mps", (2, 13), "mps"),
        ("cpu", (2, 11), None),
        ("cpu", (2, 13), None),
    ],
)
def test_fp16_comes_with_a_scaler_for_its_device_or_not_at_all(backend, version, scaler):
    if scaler is None:
        with pytest.raises(PrecisionError, match="use bf16-mixed or 32-true"):
            choose("16-mixed", backend, torch_version=version)
        return
    assert choose("16-mixed", backend, torch_version=version).scaler
    assert Platform(backend=backend, native_bf16=True, torch_version=version).device_type == scaler


@pytest.mark.parametrize("requested", NO_SCALER)
@pytest.mark.parametrize("version", [(2, 7), (2, 12), (2, 13)])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "mps", "xpu"])
def test_no_other_precision_has_a_scaler(backend, version, requested):
    if (backend, requested) == ("mps", "64-true"):
        with pytest.raises(PrecisionError, match="Metal has no float64; use 32-true"):
            choose(requested, backend, torch_version=version)
        return
    choice = choose(requested, backend, torch_version=version)

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
def test_a_mac_is_asked_for_its_chip_and_its_torch(mac, chip, native):
    mac(chip, version="2.12.1")

    assert platform_of(torch.device("mps")) == Platform(backend="mps", native_bf16=native, torch_version=(2, 12))


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
