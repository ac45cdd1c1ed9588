"""`simulate=…` on the command line runs the whole stack on this CPU.

Every figure is marked as the simulated machine's.
"""

import csv
import json

import pytest

from lightning_unified.cli.config.composition import composed, searching
from lightning_unified.cli.doctor import diagnose
from lightning_unified.cli.doctor import main as doctor
from lightning_unified.cli.main import main
from lightning_unified.cli.plan.target_machine import target_of
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from tests.cli.conftest import CONF
from tests.support.lanes import first_cells, slow


def test_a_run_on_a_simulated_mac_keeps_its_contract_and_marks_every_figure(command, tiny, tmp_path):
    """One run, looked at from all sides: each run costs seconds."""
    own = tuple(each for each in tiny if each not in ("hardware=cpu", "trainer.enable_progress_bar=false"))
    done = command("hardware=mps", "simulate=m2-16gb", "memory=small", "trainer.max_steps=12", "run_dir=run", *own)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    columns = next(csv.reader((tmp_path / "run/metrics.csv").open()))

    assert done.code == 0, done.err
    assert summary["device"] == "mps (simulated m2-16gb on cpu)"
    assert summary["pool"] == "unified"
    assert summary["precision"] == "bf16-mixed"
    assert summary["peak_bytes"]["measured"] > 0
    assert "simulated m2-16gb: " in summary["peak_bytes"]["source"]
    assert (plan["simulated"], plan["budget_bytes"]) == ("m2-16gb", 8 * 2**30)
    assert "simulated m2-16gb" in plan["reasons"]["budget"]
    assert "memory_simulated_m2-16gb/allocated" in columns
    assert not any(column.startswith("memory/") for column in columns)
    assert (tmp_path / "run/plots/memory.png").is_file()
    assert "Apple M2 (simulated m2-16gb)" in done.out
    assert "GiB (simulated m2-16gb)" in done.out + done.err  # the progress bar


@pytest.mark.slow
def test_a_resumed_run_stays_on_the_simulated_machine(command, tiny, tmp_path):
    own = tuple(each for each in tiny if each != "hardware=cpu")
    done = [
        command("hardware=mps", "simulate=m2-16gb", "memory=small", "trainer.max_steps=2", "run_dir=run", *own),
        command("resume=run", "trainer.max_steps=3"),
    ]

    assert [each.code for each in done] == [0, 0], done
    assert json.loads((tmp_path / "run/summary.json").read_text())["device"] == "mps (simulated m2-16gb on cpu)"


@first_cells(
    1,
    ("overrides", "message"),
    [
        (
            ("hardware=cuda", "simulate=m2-16gb"),
            "hardware=cuda contradicts simulate=m2-16gb, which has: mps (Apple M2 ",
        ),
        slow(("hardware=cpu", "simulate=h200"), "use hardware=cuda or hardware=auto, or simulate another machine"),
        slow(("hardware=jetson", "simulate=gb10-128gb"), "use hardware=dgx_spark or hardware=auto"),
        slow(("simulate=m2-16",), "simulate=m2-16 is not a known machine; did you mean m2-16gb?"),
        (("simulate=m2-16gb", "memory.compile=blocks"), "compiled code takes memory where it cannot be counted"),
        (("simulate=m2-16gb", "trainer.strategy=auto"), "only the unified strategy runs on a simulated machine"),
        slow(("simulate=m2-16gb", "memory.budget=28GiB"), "a budget of 28.00 GiB is above the pool of mps, 11.84 GiB"),
    ],
)
def test_what_contradicts_the_simulated_machine_is_refused(command, overrides, message, tmp_path):
    done = command(*overrides, "data=builtin", "run_dir=run")

    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", PROFILES)
def test_doctor_looks_at_a_simulated_machine(name, capsys):
    assert doctor(["--simulate", name, "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)

    assert diagnosis["hardware"] == PROFILES[name].hardware
    assert diagnosis["reading"]["name"].endswith(f"(simulated {name})")
    assert diagnosis["reading"]["total"]["source"].startswith(f"simulated {name}: ")


@first_cells(1, ("data", "key"), [("builtin", "texts"), ("wordle", "wordle")])
def test_doctor_and_plan_agree_on_the_loader_processes_of_a_mac(data, key):
    machine = SimulatedMachine("m5-32gb")
    said = next(one for name, one in diagnose(sources=machine.sources).workers.items() if name.startswith(key))
    with searching(CONF):
        planned = target_of(composed([f"data={data}", "hardware=mps"]).config, "m5-32gb").workers

    assert planned == said
    assert said.count == {"builtin": 0, "wordle": 4}[data]


def test_doctor_refuses_a_machine_it_does_not_know(capsys):
    assert main(["doctor", "--simulate", "m2"]) == 2
    assert "did you mean m2-16gb" in capsys.readouterr().err
