"""Ctrl-C says what is kept, errors come last, and paths with = are read as they are printed."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_unified.cli.config.overrides import with_quoted_paths
from lightning_unified.cli.run.job import _own_lines
from lightning_unified.terminal import label
from tests.support.lanes import first_cells


def raising(_self, *_args, **_kwargs):
    """Stand for `Trainer.fit`, which turns Ctrl-C into `SystemExit`."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemExit(1)  # noqa: B904 - as Lightning does


def test_ctrl_c_before_the_first_batch_says_that_nothing_was_saved(command, tiny, monkeypatch):
    monkeypatch.setattr("lightning.Trainer.fit", raising)
    done = command("memory=debug", "trainer.max_steps=2", "run_dir=run", *tiny)

    assert done.code == 130
    assert "interrupted: nothing was saved" in done.err


def test_ctrl_c_after_the_training_names_the_checkpoint_and_the_command(command, tiny, monkeypatch):
    monkeypatch.setattr("lightning_unified.cli.run.result.finish", raising)
    done = command("memory=debug", "trainer.max_steps=1", "trainer.limit_val_batches=0", "run_dir=a=b/run", *tiny)

    assert done.code == 130
    assert "interrupted: a=b/run/checkpoints/last.ckpt is kept; go on with: python train.py 'resume=" in done.err


@contextmanager
def shown(doing):
    """Stand for an activity that took long enough to be shown."""
    try:
        yield
    finally:
        sys.stderr.write(f"{doing}: 5.04 s\n")


@first_cells(
    1,
    ("doing", "given", "last"),
    [
        ("loading libraries", "memory.budget=4000TiB", "this cannot be run: "),
        ("preparing data and model", "data.path=absent.txt", "this cannot be run: "),
    ],
)
def test_the_error_is_the_last_thing_printed(command, tiny, monkeypatch, doing, given, last):
    monkeypatch.setattr("lightning_unified.cli.run.job.activity", shown)
    done = command("memory=debug", "trainer.max_steps=2", *tiny, given)

    assert done.code == 2
    activity, error = done.err.index(f"{doing}: 5.04 s\n"), done.err.index(last)
    assert activity < error
    assert "5.04 s" not in done.err[error:]


@pytest.mark.slow
def test_what_ctrl_c_left_is_the_last_thing_printed(command, tiny, monkeypatch):
    monkeypatch.setattr("lightning_unified.cli.run.job.activity", shown)
    monkeypatch.setattr("lightning_unified.cli.run.parts.build", raising)
    done = command("memory=debug", "trainer.max_steps=2", *tiny)

    assert done.code == 130
    assert done.err.endswith("preparing data and model: 5.04 s\n\ninterrupted: nothing was saved\n")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("resume=runs/sweep/model.width=8,seed=3", "resume='runs/sweep/model.width=8,seed=3'"),
        ("run_dir=runs/é (2)", "run_dir='runs/é (2)'"),
        ("resume='runs/a=b'", "resume='runs/a=b'"),
        ("resume=runs/plain", "resume=runs/plain"),
        ("run_dir=${name}/x", "run_dir=${name}/x"),
        ("run_dir=one,two", "run_dir=one,two"),
        ("data.path=a=b", "data.path=a=b"),
    ],
)
def test_paths_that_hydra_cannot_read_get_quotes(given, read):
    assert with_quoted_paths([given]) == [read]


def test_a_folder_that_is_there_is_no_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one,two").mkdir()

    assert with_quoted_paths(["resume=one,two"]) == ["resume='one,two'"]


@pytest.mark.parametrize(
    ("mode", "launcher", "name"),
    [
        ("RUN", "hydra._internal.core_plugins.basic_launcher.BasicLauncher", ""),
        ("MULTIRUN", "hydra._internal.core_plugins.basic_launcher.BasicLauncher", ""),
        ("MULTIRUN", "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "[seed=3] "),
    ],
)
def test_lines_bear_names_where_a_launcher_runs_several_at_once(monkeypatch, mode, launcher, name):
    from hydra.types import RunMode

    job = SimpleNamespace(override_dirname="seed=3", id="0")
    hydra = SimpleNamespace(mode=RunMode[mode], launcher={"_target_": launcher}, job=job)
    monkeypatch.setattr("lightning_unified.cli.run.job.HydraConfig.get", lambda: hydra)
    with _own_lines():
        assert label() == name
