"""Help, shell completion and kept corrections of the `plan` command."""

import json
import os
import re
import subprocess
import sys

import pytest

from lightning_unified.cli.main import main as any_command
from lightning_unified.cli.plan.show import waiting
from lightning_unified.cost_model.rates import Alignment, tabled_rates
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.files.folders import CACHE_VARIABLE


@pytest.fixture
def corrections(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    kept = Calibration.load("a-gpu-80gib")
    kept.record("cuda bf16-mixed none", predicted_bytes=100, measured_bytes=103)
    gain = {"device": "a GPU", "dtype": "bfloat16", "seconds_per_row": {}, "without": {"multiple of 64": 1.2}}
    kept.keep(
        rates=tabled_rates("h200"), alignment=Alignment(**gain, multiple=64, gain=1.2, source="measured, made up")
    )
    return kept.path


def test_what_was_learnt_of_a_machine_is_shown_with_its_sources(command, corrections):
    done = command("--calibration", "show")

    text = " ".join(done.out.split())
    assert done.code == 0 and "1 machine in" in text
    assert "peak, cuda bf16-mixed none 1.030 measured over predicted" in text and "TFLOP/s table:" in text
    assert "alignment × 1.20 without on a GPU sizes that are multiples of 64 pay" in text
    assert list(json.loads(command("--calibration", "show", "--json").out)["machines"]) == ["a-gpu-80gib"]


def test_what_was_learnt_is_forgotten_when_asked(command, corrections):
    assert "forgotten: a-gpu-80gib" in command("--calibration", "clear").out
    assert not corrections.exists()
    assert "nothing to forget" in command("--calibration", "clear").out
    assert "nothing is kept yet" in command("--calibration", "show").out


def test_the_help_names_every_flag_the_groups_and_the_exit_codes(command):
    done = command("--help")

    assert done.code == 0
    for text in (
        "--fits-where",
        "--batch-shape",
        "memory     auto, debug, large",
        "1 nothing fits",
        "simulate=m2-16gb",
    ):
        assert text in done.out


def test_the_command_is_one_of_those_there_are(capfd):
    assert any_command(["--help"]) == 0
    assert re.search(r"^  plan +predict", capfd.readouterr().out, flags=re.MULTILINE)
    assert any_command(["plam"]) == 2
    assert "did you mean plan?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("python -m lightning_unified plan --fi", ["--fits-where"]),
        ("python -m lightning_unified plan memory=de", ["memory=debug"]),
        ("python -m lightning_unified plan --json memory=small model.wid", ["model.width="]),
    ],
)
def test_a_line_is_completed_with_flags_groups_and_keys(command, monkeypatch, line, choices):
    monkeypatch.setenv("COMP_LINE", line)

    assert command("--shell-completion", "query=bash").out.split() == choices


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash")
def test_what_is_installed_is_bash_and_keeps_the_completion_that_was_there(command):
    install = command("--shell-completion", "install=bash").out
    script = f"before() {{ COMPREPLY=(kept); }}\ncomplete -F before python\n{install}\nCOMP_LINE='python x.py '\n_lightning_unified_plan\necho ${{COMPREPLY[@]}}"
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("kept", "")


def test_an_activity_is_not_shown_in_a_notebook(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebook kernels do
    with waiting("tracing the step"):
        pass

    assert capsys.readouterr().err == ""


def test_planning_starts_without_the_slow_imports_where_the_request_makes_no_sense():
    probe = "import sys; from lightning_unified.cli.plan.command import main; main(['--nope']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
