"""Importing the package is cheap, and no import goes up a layer."""

import subprocess
import sys

from tests.support import ROOT

PROBE = "import sys, lightning_unified; print(*sorted({'torch', 'lightning', 'hydra', 'omegaconf'} & set(sys.modules)))"


def test_importing_the_package_imports_neither_torch_nor_lightning_nor_hydra():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_no_import_goes_up_a_layer():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_the_train_script_is_short():
    assert len((ROOT / "train.py").read_text().splitlines()) <= 60
