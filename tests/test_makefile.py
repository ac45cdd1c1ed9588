"""`make PYTHON=…` answers for the Python that it was given, before it installs anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def python(path, version, *, supported):
    """Write a program that says its version and whether it is supported, and does nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit {0 if supported else 1}\n'
    )
    path.chmod(0o755)
    return path


def make(folder, *arguments):
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_python_that_is_too_new_is_named_with_its_version(tmp_path):
    given = python(tmp_path / "bin/python3.14", "3.14.1", supported=False)
    done = make(tmp_path, "train", f"PYTHON={given}")

    assert done.returncode == 2
    assert f"PYTHON={given} is Python 3.14.1; Python 3.11, 3.12 or 3.13 is needed." in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path):
    done = make(tmp_path, "train", "PYTHON=python3.99")

    assert done.returncode == 2
    assert "PYTHON=python3.99: there is no such program; Python 3.11, 3.12 or 3.13 is needed." in done.stderr


def test_an_environment_of_another_python_is_named_and_kept(tmp_path):
    given = python(tmp_path / "bin/python3.13", "3.13.2", supported=True)
    python(tmp_path / ".venv/bin/python", "3.11.9", supported=True)
    (tmp_path / ".venv/.installed").touch()
    done = make(tmp_path, "train", f"PYTHON={given}")

    assert done.returncode == 2
    assert f"PYTHON={given} is Python 3.13.2, and .venv has Python 3.11.9; remove it by make clean" in done.stderr
    assert make(tmp_path, "help", f"PYTHON={given}").returncode == 0


def test_the_python_of_the_environment_is_used(tmp_path):
    given = python(tmp_path / ".venv/bin/python", "3.13.2", supported=True)
    done = make(tmp_path, "-n", "train", f"PYTHON={given}")

    assert "3.13 is needed" not in done.stderr
    assert ".venv/bin/python train.py" in done.stdout
