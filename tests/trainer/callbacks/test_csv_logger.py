"""`metrics.csv` is one file for a run and its resumes."""

import csv

import pytest
import torch

from lightning_unified.callbacks import RunCheckpoint, RunCSVLogger
from lightning_unified.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_resumed_run_follow_those_of_the_first(small_run, tmp_path):
    options = {"log_every_n_steps": 1, "limit_val_batches": 0}
    for steps, resume in ((3, None), (6, tmp_path / "last.ckpt")):
        callbacks = [RunCheckpoint(tmp_path, monitor=None)]
        logger = RunCSVLogger(tmp_path)
        small_run.fit(tmp_path, callbacks=callbacks, logger=logger, resume=resume, max_steps=steps, **options)

    assert [row["step"] for row in rows(tmp_path)] == list("012345")
    assert all(row["train/loss"] for row in rows(tmp_path))


def test_new_columns_come_after_the_old_ones_and_old_rows_stay(tmp_path):
    first = RunCSVLogger(tmp_path)
    first.log_metrics({"b": 1.0}, step=0)
    first.finalize("success")
    second = RunCSVLogger(tmp_path)
    second.log_metrics({"a": 2.0, "b": 3.0}, step=1)
    second.finalize("success")

    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,b,a", "0,1.0,", "1,3.0,2.0"]


def test_rows_are_on_the_disk_after_every_n_calls(tmp_path):
    logger = RunCSVLogger(tmp_path, flush_every=3)
    for step in range(2):
        logger.log_metrics({"a": step}, step=step * 100)
    assert not (tmp_path / "metrics.csv").exists()

    logger.log_metrics({"a": 2}, step=200)

    assert [row["step"] for row in rows(tmp_path)] == ["0", "100", "200"]


def test_what_belongs_to_one_step_shares_a_row(tmp_path):
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, step=5)
    logger.log_metrics({"b": torch.tensor(2)}, step=5)
    logger.log_metrics({"a": 9}, step=5)
    logger.finalize("success")

    assert rows(tmp_path) == [{"step": "5", "a": "1", "b": "2"}, {"step": "5", "a": "9", "b": ""}]


def test_a_line_that_a_killed_run_left_unfinished_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,a\n0,1\n1")
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"a": 2}, step=2)
    logger.finalize("success")

    assert [row["step"] for row in rows(tmp_path)] == ["0", "1", "2"]


def test_an_empty_file_is_a_new_one(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"a": 2}, step=2)
    logger.finalize("success")

    assert rows(tmp_path) == [{"step": "2", "a": "2"}]


def test_the_file_stands_in_the_runs_own_folder_beside_the_hyperparameters(small_run, tmp_path):
    logger = RunCSVLogger(tmp_path / "run")
    logger.log_hyperparams({"lr": 0.1})
    _, trainer = small_run.fit(tmp_path, logger=logger, enable_checkpointing=False, max_steps=1, log_every_n_steps=1)

    assert trainer.log_dir == str(tmp_path / "run")
    assert (tmp_path / "run/metrics.csv").exists()


def test_a_prefix_is_put_before_names(tmp_path):
    logger = RunCSVLogger(tmp_path, prefix="x")
    logger.log_metrics({"a": 2}, step=2)
    logger.finalize("success")

    assert rows(tmp_path) == [{"step": "2", "x-a": "2"}]


def test_a_flush_interval_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="flush_every=0: give a whole number, 1 or more"):
        RunCSVLogger(tmp_path, flush_every=0)
