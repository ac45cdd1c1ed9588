"""Calibrations are kept between runs, only raise peaks, and can be listed and deleted."""

import json
import logging

import pytest

from lightning_unified.cost_model.rates import Alignment
from lightning_unified.cost_model.rates.calibration import (
    Calibration,
    cache_directory,
    calibrated_machines,
    clear_calibrations,
    kind_of,
    machine_key,
)
from tests.support.memory.made_traces import rates

KIND = kind_of(backend="cuda", precision="bf16-mixed", recomputes=False)
ALIGNMENT = Alignment(
    device="x", dtype="bfloat16", seconds_per_row={512: 1e-6}, without={}, multiple=8, gain=1.2, source="made by hand"
)


@pytest.fixture
def kept(tmp_path):
    return lambda machine="box": Calibration.load(machine, directory=tmp_path / "calibration")


def learn(calibration, *ratios):
    for ratio in ratios:
        calibration.record(KIND, predicted_bytes=10**6, measured_bytes=int(ratio * 10**6))


def test_nothing_is_corrected_before_anything_was_measured(kept):
    assert (kept().rates, kept().peak_factor(KIND)) == (None, 1.0)


def test_what_was_learnt_is_there_in_the_next_run(kept):
    learn(kept(), 1.02, 1.05)
    kept().keep(rates=rates(), alignment=ALIGNMENT)

    assert kept().peak_factor(KIND) == pytest.approx(1.05)
    assert (kept().rates, kept().alignment) == (rates(), ALIGNMENT)


def test_speeds_and_what_alignment_gains_are_measured_once_per_machine(kept, monkeypatch):
    measured = []
    for name, result in (("measure_rates", rates()), ("measure_alignment", ALIGNMENT)):
        monkeypatch.setattr(
            f"lightning_unified.cost_model.rates.calibration.{name}",
            lambda device, name=name, result=result: measured.append((name, device)) or result,
        )
    kept().keep(rates=rates())  # by a version that measured no alignment

    assert [kept().speeds("cpu"), kept().speeds("cpu")] == [rates(), rates()]
    assert kept().alignment == ALIGNMENT
    assert kept("another").speeds("cpu") == rates()
    assert measured == [("measure_alignment", "cpu"), ("measure_rates", "cpu"), ("measure_alignment", "cpu")]


def test_a_correction_raises_by_the_worst_seen_and_never_lowers(kept):
    learn(kept(), 0.9, 0.95)
    assert kept().peak_factor(KIND) == 1.0

    learn(kept(), 1.04, 1.01)
    assert kept().peak_factor(KIND) == pytest.approx(1.04)


def test_one_odd_step_cannot_raise_predictions_without_bounds(kept):
    learn(kept(), 40)

    assert kept().peak_factor(KIND) == 1.3


@pytest.mark.parametrize(
    "other",
    [
        {"backend": "mps", "precision": "bf16-mixed", "recomputes": False},
        {"backend": "cuda", "precision": "32-true", "recomputes": False},
        {"backend": "cuda", "precision": "bf16-mixed", "recomputes": True},
    ],
)
def test_other_kinds_are_not_corrected(kept, other):
    learn(kept(), 1.1)

    assert kept().peak_factor(kind_of(**other)) == 1.0


def test_old_measurements_are_forgotten(kept):
    calibration = kept()
    learn(calibration, 1.2, *[1.01] * 16)

    assert calibration.peak_factor(KIND) == pytest.approx(1.01)


def test_two_processes_do_not_forget_what_the_other_learnt(kept):
    one, other = kept(), kept()
    learn(one, 1.02)
    learn(other, 1.06)

    assert kept().peaks[KIND] == pytest.approx([1.02, 1.06])


def test_figures_that_cannot_be_are_refused(kept):
    with pytest.raises(ValueError, match="bytes must be positive"):
        kept().record(KIND, predicted_bytes=0, measured_bytes=1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"version": 1, "rates": 7, "alignment": null, "peaks": {}}',
        '{"version": 1, "rates": null, "alignment": null, "peaks": {"x": [-1]}}',
        '{"version": 1, "rates": null, "alignment": null, "peaks": {"x": [NaN]}}',
    ],
)
def test_a_broken_file_is_warned_about_once_and_written_anew(kept, tmp_path, caplog, text):
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "box.json").write_text(text)
    with caplog.at_level(logging.WARNING, logger="lightning_unified"):
        calibration = kept()
        learn(calibration, 1.1)

    assert [record.message.split(" (")[0].split("calibration ")[-1] for record in caplog.records] == [
        f"{tmp_path}/calibration/box.json cannot be read"
    ]
    assert kept().peak_factor(KIND) == pytest.approx(1.1)


def test_a_file_of_another_version_is_not_used(kept, tmp_path, caplog):
    learn(kept(), 1.1)
    path = tmp_path / "calibration" / "box.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))

    assert kept().peak_factor(KIND) == 1.0
    assert caplog.records == []


def test_a_disk_that_refuses_is_warned_about_once_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    calibration = Calibration.load("box", directory=tmp_path / "file" / "below")
    learn(calibration, 1.1, 1.2)

    assert calibration.peak_factor(KIND) == pytest.approx(1.2)
    assert len(caplog.records) == 1


def test_writing_leaves_no_other_file(kept, tmp_path):
    learn(kept(), 1.1, 1.2)

    assert [path.name for path in (tmp_path / "calibration").iterdir()] == ["box.json"]


def test_calibrations_can_be_listed_and_deleted(kept, tmp_path):
    folder = tmp_path / "calibration"
    learn(kept("box"), 1.1)
    learn(kept("attic"), 1.1)

    assert calibrated_machines(folder) == ["attic", "box"]
    assert clear_calibrations(folder) == ["attic", "box"]
    assert calibrated_machines(folder) == []


@pytest.mark.parametrize(
    ("system", "environ", "folder"),
    [
        ("linux", {"LIGHTNING_UNIFIED_CACHE": "/mine", "XDG_CACHE_HOME": "/cache"}, "/mine/calibration"),
        ("linux", {"XDG_CACHE_HOME": "/cache"}, "/cache/lightning_unified/calibration"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/lightning_unified/calibration"),
        ("linux", {}, "/home/me/.cache/lightning_unified/calibration"),
        ("darwin", {}, "/home/me/Library/Caches/lightning_unified/calibration"),
    ],
)
def test_the_folder_is_where_the_platform_keeps_caches(monkeypatch, system, environ, folder):
    monkeypatch.setenv("HOME", "/home/me")

    assert str(cache_directory(environ, system=system)) == folder


def test_another_device_memory_or_torch_is_another_machine():
    keys = {
        machine_key(device="NVIDIA H200", total_bytes=139 * 2**30, torch_version="2.13.0+cu130"),
        machine_key(device="NVIDIA H200", total_bytes=139 * 2**30, torch_version="2.11.0+cu130"),
        machine_key(device="NVIDIA H200", total_bytes=17 * 2**30, torch_version="2.13.0+cu130"),
        machine_key(device="../evil", total_bytes=None, torch_version="2.13.0"),
    }

    assert "nvidia-h200-139gib-torch-2.13.0-cu130" in keys
    assert len(keys) == 4
    assert not any("/" in key for key in keys)
