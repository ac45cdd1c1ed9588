"""`make`: its environment, the torch it installs, and its targets' overrides.

No package is installed here.
"""

import os
import shutil
import subprocess

import pytest

from lightning_unified.cli.config.composition import composed, searching
from tests.support import ROOT
from tests.support.lanes import first_cells, slow

FILES = ("Makefile", "pyproject.toml", "requirements.lock", "requirements-data.txt")
RELEASE = next(
    line.removeprefix("torch==")
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line.startswith("torch==")
)

PYTHON = """#!/bin/sh
# Stands for a Python: answers as {version} would, makes "environments" of itself, and notes every other call.
case "$1 $2" in
  "--version ") echo "Python {version}" ;;
  "-c "*) exit {refuses} ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m lightning_unified.hardware.environment") shift 2; echo "choose $*" >>calls; {choice} ;;
  *) echo "$*" >>calls ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def python(folder, name="python3.12", version="3.12.4", choice="echo torch==1.2.3", refuses=0):
    path = folder / name
    path.write_text(PYTHON.format(version=version, choice=choice, refuses=refuses))
    path.chmod(0o755)
    return path


def make(folder, *arguments):
    """Return make's exit code, its output, and the calls of the stand-in Pythons."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    environ = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "PYTHON", "TORCH"}}
    done = subprocess.run(["make", *arguments], check=False, cwd=folder, capture_output=True, text=True, env=environ)
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []


def test_make_installs_the_torch_that_fits_and_then_the_lock(checkout):
    code, _, calls = make(checkout, "train", f"PYTHON={python(checkout)}", "ARGS=memory=small")

    assert code == 0
    assert calls == [
        f"choose --release {RELEASE} --build auto",
        "-m pip install --quiet torch==1.2.3",
        "-m pip install --quiet --requirement requirements.lock",
        "-m pip install --quiet --no-deps --editable .",
        "train.py memory=small",
    ]
    assert make(checkout, "train")[2] == ["train.py"]  # what is installed is not installed again


def test_a_torch_that_is_asked_for_takes_the_place_of_the_installed_one_and_stays(checkout):
    make(checkout, "train", f"PYTHON={python(checkout)}")
    _, _, calls = make(checkout, "train", "TORCH=cpu")

    assert calls[0].endswith("--build cpu")
    assert calls[1] == "-m pip install --quiet --force-reinstall torch==1.2.3"
    assert make(checkout, "train", "TORCH=cpu")[2] == make(checkout, "train")[2] == ["train.py"]
    os.utime(checkout / "requirements.lock", (2e9, 2e9))
    assert make(checkout, "train")[2][0].endswith("--build cpu")  # also with a newer lock


def test_a_machine_without_a_fitting_torch_gets_the_remedy_and_no_environment(checkout):
    choice = "echo 'update the driver' >&2; exit 2"
    code, said, calls = make(checkout, "train", f"PYTHON={python(checkout, choice=choice)}")

    assert code == 2
    assert "update the driver" in said
    assert len(calls) == 1
    assert not (checkout / ".venv").exists()


def test_a_python_that_cannot_be_used_is_named_with_its_version(checkout):
    code, said, _ = make(checkout, "train", f"PYTHON={python(checkout, 'python3.10', '3.10.13', refuses=1)}")
    assert code == 2
    assert "python3.10 is: Python 3.10.13" in said

    code, said, _ = make(checkout, "train", "PYTHON=python3.99")
    assert code == 2
    assert "PYTHON=python3.99 is: " in said and "not found" in said


def test_a_python_of_another_version_than_the_environment_is_not_ignored(checkout):
    make(checkout, "train", f"PYTHON={python(checkout)}")
    other = python(checkout, "python3.13", "3.13.1")
    code, said, calls = make(checkout, "train", f"PYTHON={other}")

    assert (code, calls) == (2, [])
    assert f'PYTHON={other} is "Python 3.13.1", and .venv has Python 3.12.4' in said
    assert "make clean" in said
    assert make(checkout, "train", f"PYTHON={python(checkout, version='3.12.9')}")[0] == 0
    assert make(checkout, "clean", f"PYTHON={other}")[0] == 0
    assert make(checkout, "train", f"PYTHON={other}")[0] == 0


@first_cells(
    1,
    ("target", "hardware", "rows", "micro_batches", "length"),
    [
        ("train-small", "hardware=cuda", 8, 4, 1024),
        slow("train-small", "hardware=mps", 4, 8, 512),
        slow("train-small", "hardware=rocm", 2, 16, 512),
        slow("train-small-mps", None, 4, 8, 512),
        ("train-small-rocm", None, 2, 16, 512),
    ],
)
def test_the_small_targets_split_32_rows_as_the_seed_did(target, hardware, rows, micro_batches, length):
    line = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = (each for each in line.splitlines() if "train.py" in each)
    with searching(str(ROOT / "conf")):
        config = composed([*command.partition("train.py")[2].split(), *([hardware] if hardware else [])]).config

    assert config.data.batch_size == rows * micro_batches == 32
    assert config.memory.micro_batch_size == rows
    assert (config.model.preset, config.data.sequence_length) == ("gearhead-34m", length)
    assert config.hardware.name == (hardware or f"hardware={target.rpartition('-')[2]}").partition("=")[2]


def test_the_small_target_keeps_the_batch_of_32_on_a_machine_without_a_gpu():
    with searching(str(ROOT / "conf")):
        config = composed(["experiment=gearhead-34m", "hardware=cpu"]).config

    assert (config.data.batch_size, config.memory.micro_batch_size) == (32, "auto")
