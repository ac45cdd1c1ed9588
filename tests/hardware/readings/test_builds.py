"""`doctor` and the requested hardware name a build of torch that cannot use the GPU."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_unified.errors import HardwareError
from lightning_unified.hardware import Sources, require
from lightning_unified.hardware.environment.builds import build_advice, build_findings

NVIDIA, AMD = "class/drm/card0/device/vendor=0x10de\n", "class/drm/card0/device/vendor=0x1002\n"
MACHINES = {
    "NVIDIA, CPU build": (
        [NVIDIA],
        {},
        "x86_64",
        "without CUDA.*NVIDIA GPU.*CUDA build with pip install --force-reinstall torch==2.13.0$",
    ),
    "NVIDIA on ARM, CPU build": (["proc:driver/nvidia/version=R580"], {}, "aarch64", "CUDA build for aarch64 with pip"),
    "AMD, CPU build": (
        [AMD, "class/kfd/kfd/dev=1"],
        {},
        "x86_64",
        "without ROCm.*ROCm build with pip .*==2.13.0.rocm7.2 .*whl.rocm7.2$",
    ),
    "AMD, CUDA build": ([AMD, "class/kfd/kfd/dev=1"], {"cuda": "13.0"}, "x86_64", "an AMD GPU"),
    "AMD display without its compute driver": ([AMD], {}, "x86_64", None),
    "NVIDIA, CUDA build": ([NVIDIA], {"cuda": "13.0"}, "x86_64", None),
    "AMD, ROCm build": ([AMD, "class/kfd/kfd/dev=1"], {"hip": "7.0"}, "x86_64", None),
    "both, CUDA build": ([NVIDIA, "class/kfd/kfd/dev=1"], {"cuda": "13.0"}, "x86_64", None),
    "NVIDIA, a CUDA that its driver is too old for": (
        ["module/nvidia/version=550.54"],
        {"cuda": "13.0"},
        "x86_64",
        "for CUDA 13.0; .*driver 550.54.*pip install --force-reinstall torch==2.13.0.cu126 .*whl.cu126$",
    ),
    "NVIDIA, a CUDA that its driver is new enough for": (
        ["module/nvidia/version=550.54"],
        {"cuda": "12.6"},
        "x86_64",
        None,
    ),
    "NVIDIA, no driver for any build": (
        ["module/nvidia/version=470.1"],
        {},
        "x86_64",
        "without CUDA.*update it to 580",
    ),
    "AMD of an architecture without kernels, CPU build": (
        [AMD, "class/kfd/kfd/topology/nodes/1/properties=gfx_target_version 100306"],
        {},
        "x86_64",
        None,
    ),
    "both, ROCm build": ([NVIDIA, "class/kfd/kfd/dev=1"], {"hip": "7.2"}, "x86_64", None),
    "no GPU": ([], {}, "x86_64", None),
}


def sources(tmp_path, files=(), build=None, machine="x86_64", **parts):
    for text in files:
        path, _, content = text.partition("=")
        root, _, rest = path.rpartition(":")
        place = tmp_path / (root or "sys") / rest
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    version = SimpleNamespace(**({"cuda": None, "hip": None} | (build or {})))
    torch = SimpleNamespace(__version__="2.13.0+test", version=version)
    return replace(Sources(torch=torch, proc=tmp_path / "proc", sys=tmp_path / "sys"), **({"machine": machine} | parts))


@pytest.mark.parametrize("name", MACHINES)
def test_a_build_that_cannot_use_the_gpu_is_named(tmp_path, name):
    files, build, machine, wanted = MACHINES[name]
    found = build_findings(sources(tmp_path, files, build, machine))

    if wanted is None:
        assert found == []
    else:
        (finding,) = found
        assert (finding.variable, finding.value, finding.verdict) == ("torch", "2.13.0+test", "warning")
        assert re.search(wanted, finding.advice)


def test_a_cuda_that_works_with_an_older_driver_is_left_alone(tmp_path):
    older = sources(tmp_path, ["module/nvidia/version=550.54"], {"cuda": "13.0"})
    assert "CUDA 13.0" in build_advice(older)

    older.torch.cuda = SimpleNamespace(is_available=lambda: True)  # as with NVIDIA's forward-compatibility package
    assert build_advice(older) is None


@pytest.mark.parametrize("key", ["sysctl.proc_translated", "hw.optional.arm64"])
def test_a_python_under_rosetta_is_named(tmp_path, key):
    mac = sources(tmp_path, platform="darwin", sysctl={key: 1}.get)

    assert "Rosetta" in build_advice(mac)
    assert build_advice(replace(mac, machine="arm64")) is None
    assert build_advice(sources(tmp_path, platform="darwin")) is None  # an Intel Mac


def test_hardware_that_is_asked_for_says_which_build_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_unified.hardware.run_settings.detect", lambda _sources: "cpu")
    monkeypatch.setattr("lightning_unified.hardware.run_settings.describe", lambda _sources: "cpu (test)")

    with pytest.raises(HardwareError, match=r"hardware=cuda is not present.*without CUDA.*NVIDIA GPU"):
        require("cuda", sources(tmp_path, [NVIDIA]))
