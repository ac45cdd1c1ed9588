"""Sweeps by the launcher and the sweeper of the extra `sweep`, where they are installed."""

import json
import os
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.cli.config.composition import composed, searching
from lightning_unified.cli.config.sweeper import direction_of, drawn
from lightning_unified.cli.run.result import objective_of
from tests.support import ROOT


@pytest.fixture
def sweep(command, tiny):
    return lambda *arguments: command("-m", "memory=debug", "trainer.max_steps=1", "run_dir=sweep", *arguments, *tiny)


def losses(folder):
    return {
        path.parent.name: json.loads(path.read_text())["validation"]["loss"] for path in folder.glob("*/summary.json")
    }


@pytest.mark.slow
def test_optuna_finds_the_run_of_the_least_validation_loss(sweep, tmp_path):
    pytest.importorskip("optuna", minversion="4")
    done = sweep(
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "model.learning_rate=interval(1e-3,1e-1)",
    )
    found = losses(tmp_path / "sweep")
    best = OmegaConf.load(tmp_path / "sweep/optimization_results.yaml")

    assert done.code == 0
    assert len(found) == 2
    assert best.best_value == min(found.values())
    assert f"model.learning_rate={best.best_params['model.learning_rate']}" == min(found, key=found.get)


@pytest.mark.parametrize(
    ("mode", "best", "last", "wanted"), [("max", 0.7, 0.9, 0.9), ("max", 0.7, 0.6, 0.7), ("min", 0.7, 0.6, 0.6)]
)
def test_a_sweep_optimises_the_metric_that_decides_the_best_checkpoint(mode, best, last, wanted):
    checkpoints = RunCheckpoint(monitor="val/macro_f1", mode=mode)
    checkpoints.best_model_score = best
    config = OmegaConf.create({"callbacks": {"checkpoint": {"mode": mode}}})

    assert objective_of(checkpoints, {"macro_f1": last, "loss": 5.0}) == wanted
    assert objective_of(None, {"macro_f1": last, "loss": 5.0}) == 5.0
    assert direction_of(config) == {"max": "maximize", "min": "minimize"}[mode]


def test_models_judged_by_a_score_name_it_for_sweeps():
    with searching(str(ROOT / "conf")):
        named = {
            model: composed([f"model={model}", f"callbacks={callbacks}"]).config.callbacks.checkpoint
            for model, callbacks in (("classifier", "classifier"), ("wordle", "wordle"))
        }

    assert {model: (node.monitor, node.mode) for model, node in named.items()} == {
        "classifier": ("val/macro_f1", "max"),
        "wordle": ("val/win_rate", "max"),
    }


DRAWN = {
    "trainer.max_epochs=interval(1,4)": {"1", "2", "3", "4"},  # the key holds an integer
    "a.b=int(interval(3,5))": {"3", "4", "5"},
    "a.b=range(1,9,4)": {"1", "5"},
    "a.b=x,y": {"x", "y"},
    "+a.b=choice('p q',z)": {"p\\ q", "z"},
}


@pytest.mark.parametrize("override", DRAWN)
def test_a_sweep_draws_values_of_the_overrides_kind(override):
    optuna = pytest.importorskip("optuna", minversion="4")
    config = OmegaConf.create({"trainer": {"max_epochs": 3}, "a": {"b": 0.5}})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    (parsed,) = OverridesParser.create().parse_overrides([override])

    values = {drawn(study.ask(), parsed, config) for _ in range(60)}

    assert values == {f"{override.partition('=')[0]}={value}" for value in DRAWN[override]}


def test_a_logarithmic_interval_draws_small_values_as_often():
    optuna = pytest.importorskip("optuna", minversion="4")
    config = OmegaConf.create({})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    (parsed,) = OverridesParser.create().parse_overrides(["rate=tag(log,interval(1e-5,1e-1))"])

    values = [float(drawn(study.ask(), parsed, config).partition("=")[2]) for _ in range(200)]

    assert 70 < sum(value < 1e-3 for value in values) < 130


@pytest.mark.slow
def test_joblib_runs_a_grid_in_processes_and_each_leaves_its_record(sweep, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = sweep(
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model.learning_rate=1e-3,1e-1", "model.weight_decay=0,0.1"
    )

    assert done.code == 0
    assert len(losses(tmp_path / "sweep")) == 4


LAUNCHERS = {
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",  # the extra `cluster`: processes in place of jobs
    "ray": "hydra_plugins.hydra_ray_launcher",  # the extra `ray`: a cluster of this machine
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_of_a_cluster_runs_a_grid_and_leaves_out_what_is_done(tiny, tmp_path, launcher):
    pytest.importorskip(LAUNCHERS[launcher])
    line = [
        "-m",
        f"hydra/launcher={launcher}",
        "memory=debug",
        "trainer.max_steps=1",
        "run_dir=sweep",
        "resume=auto",
        *tiny,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def sweep(rates):
        command = [sys.executable, str(ROOT / "train.py"), *line, f"model.learning_rate={rates}"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    first = sweep("0.001,0.01")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/summary.json")}
    second = sweep("0.001,0.01,0.1")

    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert len(written) == 2
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert sorted(losses(tmp_path / "sweep")) == [f"model.learning_rate={rate}" for rate in ("0.001", "0.01", "0.1")]
