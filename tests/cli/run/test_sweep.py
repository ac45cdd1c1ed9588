"""Sweeps by the launcher and the sweeper of the extra `sweep`, where they are installed."""

import json

import pytest
from omegaconf import OmegaConf


@pytest.fixture
def sweep(command, tiny):
    return lambda *arguments: command("-m", "memory=debug", "trainer.max_steps=1", "run_dir=sweep", *arguments, *tiny)


def losses(folder):
    return {
        path.parent.name: json.loads(path.read_text())["validation"]["loss"] for path in folder.glob("*/summary.json")
    }


def test_optuna_finds_the_run_of_the_least_validation_loss(sweep, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
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


@pytest.mark.slow
def test_joblib_runs_a_grid_in_processes_and_each_leaves_its_record(sweep, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = sweep(
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model.learning_rate=1e-3,1e-1", "model.weight_decay=0,0.1"
    )

    assert done.code == 0
    assert len(losses(tmp_path / "sweep")) == 4
