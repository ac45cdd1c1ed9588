"""The pieces of the command line, each for itself."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from lightning_unified.cli.config.bounded_files import printable
from lightning_unified.cli.config.nearest import nearest
from lightning_unified.cli.config.overrides import parse_overrides, single_run, swept_values
from lightning_unified.cli.config.resume import apply_changes, merged_overrides
from lightning_unified.cli.failure import explain, report_failure
from lightning_unified.cli.main import main
from lightning_unified.cli.run.json_files import versions, write_json
from lightning_unified.cli.run.machine import hardware_settings
from lightning_unified.cli.run.metrics import Curve, read_curves
from lightning_unified.cli.run.plots import draw_plots
from lightning_unified.cli.run.screen import show_summary
from lightning_unified.errors import BudgetError, CheckpointError


def test_an_unknown_command_is_refused_with_the_nearest(capfd):
    assert main(["docter"]) == 2
    assert "did you mean doctor?" in capfd.readouterr().err


def test_the_help_names_the_commands_there_are(capfd):
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "doctor" in out
    assert "watch" in out
    assert "report" in out


def test_the_help_of_training_shows_groups_overrides_and_configuration(command):
    done = command("--help", "memory=small")

    assert done.code == 0
    for text in ("memory     auto, debug, large", "data.batch_size=64", "resume=", "budget: up to 8GiB", "max_steps: "):
        assert text in done.out


def test_the_configuration_can_be_printed_without_a_run(command, tmp_path):
    done = command("--cfg", "job", "--package", "memory", "memory=medium")

    assert done.code == 0
    assert "budget: up to 16GiB" in done.out
    assert not (tmp_path / "runs").exists()


def test_errors_of_the_request_are_two_and_those_of_the_run_one():
    assert explain(BudgetError("too much")) == (2, "too much")
    assert explain(CheckpointError("gone"))[0] == 1
    assert explain(RuntimeError("odd")) == (1, "RuntimeError: odd")


def test_a_long_error_is_cut_to_a_dozen_lines(capfd):
    report_failure(RuntimeError("\n".join(f"line {number}" for number in range(50))))

    assert len(capfd.readouterr().err.splitlines()) <= 12


def test_the_nearest_name_is_found_by_its_last_part():
    assert nearest("batchsize", ["data.batch_size", "trainer.max_steps"]) == "data.batch_size"
    assert nearest("zzz", ["data.batch_size"]) is None


def test_a_sweep_is_checked_by_its_values_and_an_interval_by_its_start():
    choices, interval = parse_overrides(["memory=debug,small", "model.learning_rate=interval(0.1,0.2)"])

    assert swept_values(choices) == ["debug", "small"]
    assert single_run(interval) == "model.learning_rate=0.1"


def test_overrides_given_again_replace_the_saved_ones():
    assert merged_overrides(["memory=small", "seed=1", "run_dir=a"], ["seed=2", "resume=a", "trainer.max_steps=3"]) == [
        "memory=small",
        "seed=2",
        "trainer.max_steps=3",
    ]


def test_only_what_the_new_overrides_change_is_changed():
    saved = OmegaConf.create({"memory": {"budget": "8GiB"}, "data": {"batch_size": 6}, "seed": 1})
    before = OmegaConf.create({"memory": {"budget": "8GiB"}, "data": {"batch_size": 8}, "seed": 42})
    after = OmegaConf.create({"memory": {"budget": "4GiB"}, "data": {"batch_size": 8}, "seed": 42})
    changes = apply_changes(saved, before, after)

    assert saved == {"memory": {"budget": "4GiB"}, "data": {"batch_size": 6}, "seed": 1}
    assert [(change.key, change.old, change.new) for change in changes] == [("memory.budget", "8GiB", "4GiB")]


def test_what_is_not_finite_is_written_as_null(tmp_path):
    write_json(tmp_path / "a.json", {"loss": math.nan, "list": [math.inf, 1.5], "none": None})

    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "list": [None, 1.5], "none": None}


def test_versions_name_torch_and_this_python():
    assert {"python", "torch", "lightning", "lightning-unified"} <= set(versions())


def test_plots_are_drawn_for_the_columns_there_are(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n0,2.5,\n1,,2.0\n2,2.0,\n")

    assert read_curves([tmp_path / "metrics.csv"]) == {
        "train/loss": Curve(steps=(0, 2), values=(2.5, 2.0)),
        "val/loss": Curve(steps=(1,), values=(2.0,)),
    }
    assert [path.name for path in draw_plots(tmp_path / "metrics.csv", tmp_path / "plots")] == ["loss.png"]
    assert draw_plots(tmp_path / "nowhere.csv", tmp_path / "plots") == []


def test_what_a_terminal_would_obey_is_not_printed():
    assert printable("a\x1b[2Jb\x08\x9b\n\tc") == "a\ufffd[2Jb\ufffd\ufffd\n\tc"


def test_the_summary_of_data_without_tokens_or_steps_is_printed(capsys):
    summary = {
        "model": "net",
        "parameters": 3,
        "precision": "32-true",
        "effective_batch_size": 4,
        "micro_batch_size": None,
        "recoveries": 0,
        "nonfinite_gradients": {"steps": 3, "nan": 2, "inf": 1},
        "peak_bytes": {"measured": None, "source": "unknown"},
        "budget_bytes": None,
        "ranks": 1,
        "steps": 0,
        "seconds": 0.25,
        "samples_per_second": None,
        "tokens_per_second": None,
        "validation": {},
        "resume_command": "python train.py resume=run",
    }
    show_summary(summary, baselines={}, samples=[], saved=["run"])

    out = capsys.readouterr().out

    assert "0 steps in 250 ms\n" in out
    assert "3 steps with NaN (2) or Inf (1)\n" in out


def test_allocators_are_prepared_before_the_hardware_is_looked_at(monkeypatch):
    """hardware=auto reads the accelerator first.

    The first reading of an Apple GPU freezes its watermarks.
    """
    from lightning_unified import hardware
    from lightning_unified.cli.run import job, machine

    order, config = [], OmegaConf.create({"memory": {"budget": "leave 6GiB"}, "name": "test", "simulate": None})
    asked = SimpleNamespace(runtime=SimpleNamespace(choices={"hardware": "auto"}), overrides=SimpleNamespace(task=[]))
    monkeypatch.setattr(job.HydraConfig, "get", lambda: asked)
    monkeypatch.setattr(job, "composed", lambda overrides: SimpleNamespace(config=config))
    places = {"prepare_allocators": (machine, None), "detect": (hardware, "mps"), "describe": (hardware, "a Mac")}
    for name, (place, value) in places.items():
        monkeypatch.setattr(place, name, lambda *a, name=name, value=value, **_: order.append((name, a[0])) or value)
    job.Job(config=config)._configuration(Path("here"))

    assert [name for name, _ in order] == ["prepare_allocators", "detect", "describe"]
    assert order[0][1] == "leave 6GiB"


def test_the_hardware_settings_name_a_precision_in_full():
    node = {"_target_": "lightning_unified.hardware.HardwareSettings", "precision": "fp16"}

    assert hardware_settings(OmegaConf.create({"hardware": node})).precision == "16-mixed"
