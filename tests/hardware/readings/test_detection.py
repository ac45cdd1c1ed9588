"""Detection of the configured machines."""

import pytest

from lightning_unified.errors import HardwareError
from lightning_unified.hardware import HARDWARE, describe, detect, require

EXPECTED = {
    "rtx4090": "cuda",
    "t4": "cuda",
    "gb10": "dgx_spark",
    "jetson": "jetson",
    "gh200": "cuda",
    "strix_halo": "strix_halo",
    "rx6750xt": "rocm",
    "m1": "mps",
    "m2": "mps",
    "m4_pro": "mps",
    "lunar_lake": "cpu",
    "mac_cpu": "cpu",
    "cgroup_v1": "cpu",
    "cgroup_v2": "cpu",
    "bare": "cpu",
}


@pytest.mark.parametrize(("name", "hardware"), EXPECTED.items())
def test_each_machine_is_taken_for_what_it_is(machine, name, hardware):
    assert detect(machine(name)) == hardware


@pytest.mark.parametrize(("name", "hardware"), EXPECTED.items())
def test_what_was_detected_may_be_asked_for(machine, name, hardware):
    require(hardware, machine(name))


@pytest.mark.parametrize("hardware", ["auto", "cpu"])
def test_auto_and_cpu_may_be_asked_for_everywhere(any_machine, hardware):
    require(hardware, any_machine)


@pytest.mark.parametrize(("name", "hardware"), [("gb10", "cuda"), ("jetson", "cuda"), ("strix_halo", "rocm")])
def test_the_wider_name_of_a_narrow_machine_may_be_asked_for(machine, name, hardware):
    require(hardware, machine(name))


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("rtx4090", "rocm"), ("rtx4090", "dgx_spark"), ("strix_halo", "cuda"), ("gb10", "jetson"), ("m1", "cuda")],
)
def test_another_machines_name_is_refused(machine, name, hardware):
    with pytest.raises(
        HardwareError, match=f"hardware={hardware} is not present; this machine has: .*; use hardware={EXPECTED[name]}"
    ):
        require(hardware, machine(name))


def test_hardware_absent_from_a_cpu_machine_is_refused_in_one_clear_line(machine):
    sources = machine("cgroup_v1")
    with pytest.raises(HardwareError) as caught:
        require("mps", sources)

    assert str(caught.value) == (
        "hardware=mps is not present; this machine has: cpu (Test CPU, 8 cores, 32.0 GiB); use hardware=cpu or hardware=auto."
    )


def test_an_unknown_name_is_answered_with_the_nearest_one(machine):
    with pytest.raises(HardwareError, match=r"hardware=dgx-spark is not known; did you mean dgx_spark\?"):
        require("dgx-spark", machine("bare"))


def test_an_intel_gpu_is_refused_for_want_of_a_lightning_accelerator(machine):
    with pytest.raises(HardwareError, match=r"Lightning 2\.6 has no accelerator for Intel GPUs"):
        require("xpu", machine("lunar_lake"))


def test_accelerators_are_described_before_the_processor(machine):
    described = describe(machine("strix_halo"))

    assert described == "rocm (AMD Radeon 8060S, 124.9 GiB unified), cpu (Test CPU, 16 cores, 124.9 GiB)"


def test_a_machine_that_says_nothing_is_described_as_unknown(machine):
    assert describe(machine("bare")) == "cpu (x86_64, unknown cores, unknown memory)"


def test_every_detected_name_is_a_configured_one():
    assert set(EXPECTED.values()) <= set(HARDWARE)
