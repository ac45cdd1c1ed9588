"""The file that shows a run in `watch`.

It is written now and then, always whole, and never delays the run.
"""

import json
import logging
import os
import platform
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified.files.folders import runs_folder
from lightning_unified.files.status import RunFigures, RunStatus, parse_record

FIGURES = RunFigures(
    directory="/runs/one",
    module="BoringModel",
    device="cpu",
    step=3,
    total_steps=100,
    loss=0.5,
    effective_batch_size=32,
    micro_batch_size=4,
    allocated_bytes=1,
    reserved_bytes=None,
    peak_bytes=2,
    peak_source="VmHWM",
    budget_bytes=3,
    recoveries=0,
)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr("lightning_unified.files.status.time.monotonic", lambda: now[0])
    return now


def only(folder):
    (path,) = folder.iterdir()
    return parse_record(path.read_text())


def test_the_file_says_who_and_how(tmp_path):
    RunStatus(tmp_path / "runs").tell(lambda: FIGURES)
    record = only(tmp_path / "runs")

    assert (record.pid, record.host, record.figures) == (os.getpid(), platform.node(), FIGURES)
    assert record.started <= record.updated


def test_between_two_writings_the_figures_are_not_even_asked_for(tmp_path, clock):
    asked = []
    status = RunStatus(tmp_path, every_s=2.0)
    for clock[0] in (100.0, 100.1, 101.9, 102.0, 103.0):
        status.tell(lambda: asked.append(clock[0]) or replace(FIGURES, step=len(asked)))

    assert asked == [100.0, 102.0]
    assert only(tmp_path).figures.step == 2


def test_speed_is_that_of_the_last_records_and_gives_the_time_left(tmp_path, clock):
    status = RunStatus(tmp_path)
    status.tell(lambda: FIGURES)
    assert (only(tmp_path).seconds_per_step, only(tmp_path).seconds_left) == (None, None)
    for at in range(1, 60):
        clock[0] = 100.0 + 4 * at
        status.tell(lambda at=at: replace(FIGURES, step=3 + at if at < 20 else 20 + 2 * (at - 19), total_steps=200))
    record = only(tmp_path)

    assert record.seconds_per_step == 2.0
    assert record.seconds_left == 2.0 * (200 - record.figures.step)
    assert record.as_json()["seconds_left"] == record.seconds_left


def test_the_end_removes_the_file_and_nothing_comes_back(tmp_path, clock):
    status = RunStatus(tmp_path)
    status.tell(lambda: FIGURES)
    status.end()
    clock[0] += 60
    status.tell(lambda: FIGURES)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_one_debug_line_and_no_more(tmp_path, clock, caplog):
    (tmp_path / "file").write_text("in the way")
    status = RunStatus(tmp_path / "file" / "runs")
    with caplog.at_level(logging.DEBUG, logger="lightning_unified"):
        for clock[0] in (100.0, 110.0, 120.0):
            status.tell(lambda: FIGURES)

    assert [record.levelname for record in caplog.records if "will not list this run" in record.message] == ["DEBUG"]


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, clock, monkeypatch):
    status = RunStatus(tmp_path)
    status.tell(lambda: FIGURES)
    clock[0] += 60

    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    status.tell(lambda: FIGURES)

    assert list(tmp_path.iterdir()) == []


def test_figures_that_cannot_be_read_do_not_fail_the_run(tmp_path):
    def broken():
        raise RuntimeError("the driver is gone")

    RunStatus(tmp_path).tell(broken)

    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_written_or_asked_for():
    RunStatus(None).tell(lambda: pytest.fail("asked"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": 1}', json.dumps({"updated": "yesterday"})])
def test_what_is_no_record_is_none(text):
    assert parse_record(text) is None


def test_a_record_reads_as_it_was_written(tmp_path):
    RunStatus(tmp_path).tell(lambda: FIGURES)
    record = only(tmp_path)

    assert parse_record(json.dumps(record.as_json())) == record
    assert not any(isinstance(value, dict) for value in record.as_json().values())


@pytest.mark.parametrize(
    ("system", "environ", "folder"),
    [
        ("linux", {}, "HOME/.local/state/lightning_unified/runs"),
        ("linux", {"XDG_STATE_HOME": "/state"}, "/state/lightning_unified/runs"),
        ("linux", {"XDG_STATE_HOME": "not/absolute"}, "HOME/.local/state/lightning_unified/runs"),
        ("darwin", {"XDG_STATE_HOME": "/state"}, "HOME/Library/Application Support/lightning_unified/runs"),
        ("win32", {}, "HOME/AppData/Local/lightning_unified/runs"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/lightning_unified/runs"),
        ("linux", {"LIGHTNING_UNIFIED_STATE_DIR": "/mine", "XDG_STATE_HOME": "/state"}, "/mine/runs"),
    ],
)
def test_the_folder_is_the_platforms_own_or_the_one_named(system, environ, folder):
    assert str(runs_folder(environ, system=system)) == folder.replace("HOME", str(Path.home()))


def test_without_a_home_there_is_no_folder(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)

    assert runs_folder({}, system="linux") is None


class Shown(BoringModel):
    """Keeps what its own file says while it trains."""

    manual = False

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, []
        self.automatic_optimization = not self.manual

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(only(self.folder).figures)


class ShownManual(Shown):
    """The same with manual optimisation."""

    manual = True

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step(batch))
        optimizer.step()


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a module that writes its status, and record each batch."""
    monkeypatch.setenv("LIGHTNING_UNIFIED_STATE_DIR", str(tmp_path))
    monkeypatch.setattr("lightning_unified.strategies.base.RunStatus", lambda folder: RunStatus(folder, every_s=0.0))

    def run(kind, *, steps=3, **options):
        module = kind(tmp_path / "runs")
        trainer = L.Trainer(
            strategy="unified",
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=tmp_path / "here",
            **options,
        )
        trainer.fit(module)
        return module

    return run


@pytest.mark.parametrize("kind", [Shown, ShownManual])
def test_a_run_publishes_its_step_and_its_folder(train, tmp_path, kind):
    seen = train(kind).seen

    assert [figures.step for figures in seen] == [0, 1, 2]
    assert (seen[0].module, seen[0].device, seen[0].directory) == (kind.__name__, "cpu", str(tmp_path / "here"))
    assert seen[0].budget_bytes > 0 and seen[0].allocated_bytes > 0 and seen[0].peak_bytes > 0


def test_batch_and_micro_batch_are_unknown_until_the_first_batch_is_done(train):
    sizes = [(figures.effective_batch_size, figures.micro_batch_size) for figures in train(Shown).seen]

    assert sizes == [(None, None), (1, 1), (1, 1)]


def test_the_file_is_gone_after_the_run(train, tmp_path):
    train(Shown)

    assert list((tmp_path / "runs").iterdir()) == []


def test_the_file_is_gone_after_a_run_that_failed(train, tmp_path):
    class Fails(Shown):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(Fails)

    assert list((tmp_path / "runs").iterdir()) == []
