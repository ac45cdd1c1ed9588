"""Readers see a simulated machine like a real one, and mark its figures as simulated."""

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch

from lightning_unified.cli.doctor import diagnose
from lightning_unified.errors import HardwareError
from lightning_unified.hardware import (
    HardwareSettings,
    PressureReader,
    cap_allocator,
    capabilities,
    capability,
    detect,
    mps_allocator_initialized,
    prepare_allocators,
    read,
    read_peak,
    require,
    reset_peak,
    resolve_budget,
    set_mps_environment,
)
from lightning_unified.hardware.simulated import PROFILES, Profile, SimulatedMachine, profile

MIB, GIB = 2**20, 2**30
NAMES = (
    "m1-8gb",
    "m2-16gb",
    "m3-24gb",
    "m3-max-64gb",
    "m2-max-96gb",
    "m4-max-128gb",
    "m5-max-128gb",
    "m4-pro-48gb",
    "m5-32gb",
    "jetson-orin-64gb",
    "jetson-thor-128gb",
    "gb10-128gb",
    "strix-halo-128gb",
    "rtx3060-12gb",
    "rx6750xt-12gb",
    "h200",
)
MACS = tuple(name for name in NAMES if name.startswith("m"))
MACHINES = [(name, version) for name in NAMES for version in (("2.13.0", "2.14.1") if name in MACS else ("2.13.0",))]


@pytest.fixture(params=MACHINES, ids="-".join)
def machine(request):
    name, version = request.param
    return SimulatedMachine(name, torch_version=version)


def test_the_machines_are_those_of_the_documentation():
    assert tuple(PROFILES) == NAMES


def test_an_unknown_machine_is_refused_with_the_nearest():
    with pytest.raises(HardwareError, match=r"simulate=m2-16 is not a known machine; did you mean m2-16gb\?"):
        profile("m2-16")


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_of_a_profile_says_where_it_comes_from(name):
    entry = PROFILES[name]
    defaults = {field.name: field.default for field in dataclasses.fields(Profile)}
    plain = {
        "name",
        "hardware",
        "backend",
        "chip",
        "unified",
        "origin",
        "capability",
    }  # what the machine is called and sold as
    documented = {name.strip() for names in entry.origin for name in names.split(",")}
    set_here = {field for field, default in defaults.items() if getattr(entry, field) != default}

    assert set_here - plain - documented - {"arch"} == set()
    assert all(entry.origin.values())


def test_a_reading_has_the_profiles_sizes_and_says_that_it_is_simulated(machine):
    reading, entry = machine.reading(), machine.profile
    label = f"simulated {entry.name}"

    assert reading.name == f"{entry.chip} ({label})"
    assert (reading.backend, reading.pool) == (entry.backend, "unified" if entry.unified else "dedicated")
    assert reading.host.bytes == pytest.approx(entry.ram, abs=1024)
    assert reading.total.bytes == entry.total or entry.name == "strix-halo-128gb"  # there the host's RAM is more
    assert 0 < reading.available.bytes <= reading.total.bytes
    figures = [getattr(reading, name) for name in ("total", "available", "allocated", "reserved", "peak", "host")]
    assert all(figure.source.startswith(f"{label}: ") for figure in figures)


def test_what_a_run_allocates_shows_in_every_figure(machine):
    before = machine.reading()
    with machine.active():
        x = torch.empty(64 * MIB, dtype=torch.uint8)
        during = machine.reading()
        del x
    after = machine.reading()

    assert during.allocated.bytes == 64 * MIB
    assert (before.allocated.bytes, after.allocated.bytes) == (0, 0)
    assert during.reserved.bytes > before.reserved.bytes
    assert during.available.bytes <= before.available.bytes  # cached blocks of a heap can still be had
    assert after.peak.bytes == 64 * MIB


def test_the_peak_is_read_and_set_back(machine):
    with machine.active():
        torch.empty(MIB, dtype=torch.uint8)
    peak = read_peak(machine.device, sources=machine.sources)

    assert (peak.bytes, peak.source.startswith("simulated ")) == (MIB, True)
    assert reset_peak(machine.device, sources=machine.sources)
    assert read_peak(machine.device, sources=machine.sources).bytes == 0


def test_a_machine_has_the_torch_it_is_given_else_the_installed_one():
    given = SimulatedMachine("m2-16gb", torch_version="2.14.1")
    restored = pickle.loads(pickle.dumps(given))

    assert [each.sources.torch.__version__ for each in (given, restored)] == ["2.14.1", "2.14.1"]
    assert restored.allocator.allocate(MIB + 1).size == MIB + 32 * 1024  # as torch 2.14 rounds
    assert SimulatedMachine("m2-16gb").sources.torch.__version__ == torch.__version__
    with pytest.raises(HardwareError, match=r"torch_version='new' is not a version of torch; write it as in '2\.14'"):
        SimulatedMachine("m2-16gb", torch_version="new")


def test_with_a_torch_whose_metal_counts_no_peak_neither_does_the_simulation():
    machine = SimulatedMachine("m2-16gb", torch_version="2.12.1")
    with machine.active():
        torch.empty(MIB, dtype=torch.uint8)
    peak = machine.reading().peak

    assert (peak.bytes, machine.allocator.peak) == (None, MIB)
    assert peak.source.startswith("simulated m2-16gb: unknown: ")
    assert not reset_peak("mps", sources=machine.sources)


def test_a_budget_caps_the_simulated_allocator(machine):
    budget = resolve_budget("2GiB", machine.reading())
    cap = cap_allocator(machine.device, budget, sources=machine.sources)

    assert cap.applied
    assert machine.allocator.limit == pytest.approx(2 * GIB, abs=64)


def test_the_machine_is_the_hardware_its_profile_names(machine):
    assert detect(machine.sources) == machine.profile.hardware
    require(machine.profile.hardware, machine.sources)
    with pytest.raises(HardwareError, match=r"is not present; this machine has: .*simulated"):
        require("cuda" if machine.profile.backend != "cuda" else "mps", machine.sources)


def test_capabilities_agree_with_the_profile(machine):
    known = capabilities(machine.device, sources=machine.sources)

    assert capability("bf16", known) == machine.profile.bf16
    assert capability("flash_attention_training", known) == machine.profile.flash


def test_settings_and_doctor_take_it_for_a_machine(machine):
    known = capabilities(machine.device, sources=machine.sources)
    settings = HardwareSettings().resolve(machine.reading(), known, sources=machine.sources)
    diagnosis = diagnose(machine.device, sources=SimulatedMachine(machine.profile).sources)

    assert settings.accelerator == machine.device
    assert diagnosis.hardware == machine.profile.hardware
    assert f"simulated {machine.profile.name}" in diagnosis.machine
    assert (diagnosis.tier is not None) or machine.profile.name == "m1-8gb"


def test_pressure_follows_what_others_and_the_run_hold(machine):
    reader = PressureReader(machine.sources)
    levels = [reader.read(0.0).level]
    machine.others = machine.profile.ram - machine.profile.ram // 500
    levels.append(reader.read(1.0).level)
    machine.others = machine.profile.others
    levels.append(reader.read(2.0).level)

    assert levels == ["normal", "critical", "normal"]


@pytest.mark.parametrize("name", ["m2-16gb", "gb10-128gb"])
def test_memory_of_the_gpu_presses_on_the_host_it_shares(name):
    machine = SimulatedMachine(name, bounded=False)
    reader = PressureReader(machine.sources)
    reader.read(0.0)
    machine.allocator.allocate(machine.profile.ram)
    pressure = reader.read(1.0)

    assert pressure.level == "critical"
    assert pressure.available.bytes == 0
    assert pressure.swap_out_bytes_per_s > GIB


def test_memory_of_a_card_does_not_press_on_the_host():
    machine = SimulatedMachine("rtx3060-12gb")
    machine.allocator.allocate(8 * GIB)

    assert PressureReader(machine.sources).read(0.0).level == "normal"
    assert machine.reading().available.bytes < 4 * GIB


def test_a_gb10_calls_its_page_cache_used_and_the_reader_does_not_believe_it():
    machine = SimulatedMachine("gb10-128gb")
    free, _ = machine.sources.torch.cuda.mem_get_info(0)

    assert machine.reading().available.bytes - free == pytest.approx(machine.profile.page_cache, abs=2 * MIB)


@pytest.mark.parametrize("name", MACS)
def test_the_watermarks_reach_metals_allocator_in_the_order_it_needs(name):
    machine = SimulatedMachine(name)
    assert mps_allocator_initialized(machine.sources) is False
    written = set_mps_environment("50%", sources=machine.sources)
    assert machine.allocator.limit == int(0.5 * machine.profile.total)
    too_late = set_mps_environment("60%", sources=machine.sources)

    assert written.applied
    assert mps_allocator_initialized(machine.sources) is True
    assert "too late" in too_late.reason


def test_a_gb10_is_capped_before_its_allocator_exists():
    machine = SimulatedMachine("gb10-128gb", torch_version="2.13.0")  # the first that reads the share
    written = prepare_allocators("50%", sources=machine.sources)

    assert written.applied
    assert not machine.allocator.constructed
    assert machine.allocator.limit == machine.profile.total // 2
    assert not prepare_allocators("40%", sources=machine.sources).applied


def test_without_a_pair_metals_own_ratios_stand_and_half_a_pair_is_refused():
    assert SimulatedMachine("m2-16gb").allocator.limit == int(1.7 * 11.84 * GIB)
    half = SimulatedMachine("m2-16gb", environ={"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "1.0"})
    with pytest.raises(RuntimeError, match=r"invalid low watermark ratio 1\.4"):
        half.allocator.allocate(1)


def test_the_environment_of_the_simulated_machine_is_its_own(monkeypatch):
    monkeypatch.delenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", raising=False)
    machine = SimulatedMachine("m2-16gb")
    set_mps_environment("2GiB", sources=machine.sources)

    assert "PYTORCH_MPS_LOW_WATERMARK_RATIO" in machine.sources.environ
    assert "PYTORCH_MPS_LOW_WATERMARK_RATIO" not in os.environ


@pytest.mark.parametrize(("fraction", "error"), [(1, TypeError), (2.5, ValueError), (-0.1, ValueError)])
def test_a_fraction_that_torch_refuses_is_refused(fraction, error):
    with pytest.raises(error, match="fraction"):
        SimulatedMachine("m2-16gb").sources.torch.mps.set_per_process_memory_fraction(fraction)


def test_nothing_of_the_simulated_host_can_be_written_or_found_by_name():
    proc = SimulatedMachine("rtx3060-12gb").sources.proc

    assert not reset_peak("cpu", sources=SimulatedMachine("rtx3060-12gb").sources)
    assert read("cpu", sources=SimulatedMachine("rtx3060-12gb").sources).total.bytes == 32 * GIB
    assert proc.is_dir() and not (proc / "self").is_dir()
    assert sorted(path.name for path in proc.glob("*")) == ["cpuinfo", "information", "meminfo", "vmstat"]
    with pytest.raises(FileNotFoundError, match="nonexistent"):
        Path(proc / "meminfo").read_text()
