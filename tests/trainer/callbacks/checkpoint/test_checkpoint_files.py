"""Which files a run leaves, what they hold, and what a failed write does to them."""

import os
import resource
from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk(limit=2000):
    """No file may grow beyond `limit` bytes.

    The write fails within the file, as on a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_newest_step_files_stay_with_last_and_best(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "c", every_n_steps=2, keep=3)], max_steps=11)

    steps = ["step_000006.ckpt", "step_000008.ckpt", "step_000010.ckpt"]
    assert names(tmp_path / "c") == ["best.ckpt", "last.ckpt", *steps]
    assert torch.load(tmp_path / "c/last.ckpt")["global_step"] == 11


def test_last_is_the_newest_step_file_itself_and_not_a_second_one(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, every_n_steps=6)], max_steps=6)

    assert os.path.samefile(tmp_path / "last.ckpt", tmp_path / "step_000006.ckpt")


def test_a_step_is_written_once_whatever_names_it_gets(small_run, tmp_path, monkeypatch):
    written = []
    save = AtomicCheckpointIO.save_checkpoint
    monkeypatch.setattr(
        AtomicCheckpointIO, "save_checkpoint", lambda *args, **kw: (written.append(args[2]), save(*args, **kw))
    )
    checkpoint = RunCheckpoint(tmp_path, every_n_steps=5)
    small_run.fit(tmp_path, callbacks=[checkpoint], plugins=[AtomicCheckpointIO()], max_steps=5)

    assert os.path.samefile(tmp_path / "best.ckpt", tmp_path / "step_000005.ckpt")
    assert len(written) == 1


def test_best_is_the_least_of_all_validations(small_run, tmp_path):
    module, trainer = small_run.build(tmp_path, callbacks=[RunCheckpoint(tmp_path, every_n_steps=50)], max_steps=5)
    values = iter([3.0, 1.0, 2.0, float("nan"), 1.5])
    module.validation_step = lambda batch, batch_idx: module.log("val/loss", value)

    def start():
        nonlocal value
        value = next(values)

    value = 0.0
    module.on_validation_start = start
    trainer.limit_val_batches, trainer.val_check_interval, trainer.check_val_every_n_epoch = 1, 1, None
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())

    best = torch.load(tmp_path / "best.ckpt")
    assert best["global_step"] == 2
    assert best["callbacks"]["RunCheckpoint"]["best_score"] == trainer.checkpoint_callback.best_model_score == 1.0


def test_trainer_finds_the_best_file_by_name(small_run, tmp_path):
    module, trainer = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path)], max_steps=5)
    trainer.validate(module, small_run.validation_loader(), ckpt_path="best", verbose=False)

    assert trainer.ckpt_path == str(tmp_path / "best.ckpt")


def test_early_stopping_leaves_a_last_file_of_the_step_it_stopped_at(small_run, tmp_path):
    early = EarlyStopping("val/loss", patience=1, min_delta=1e9)
    _, trainer = small_run.fit(
        tmp_path, callbacks=[early, RunCheckpoint(tmp_path)], val_check_interval=3, check_val_every_n_epoch=None
    )
    state = torch.load(tmp_path / "last.ckpt")

    assert state["global_step"] == trainer.global_step == 6
    assert next(v for k, v in state["callbacks"].items() if k.startswith("EarlyStopping"))["wait_count"] == 1


def test_a_run_that_goes_on_from_an_older_file_drops_the_newer_ones_first(small_run, tmp_path):
    options = {"every_n_steps": 2, "keep": 3}
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, **options)], max_steps=12)
    assert [n for n in names(tmp_path) if n.startswith("step")] == [f"step_{n:06d}.ckpt" for n in (8, 10, 12)]
    older = tmp_path / "step_000008.ckpt"
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, every_n_steps=3, keep=3)], resume=older, max_steps=9)

    assert [n for n in names(tmp_path) if n.startswith("step")] == [f"step_{n:06d}.ckpt" for n in (8, 9, 12)]


def test_a_missing_monitor_is_named_with_what_is_there_and_training_goes_on(small_run, tmp_path):
    with pytest.warns(UserWarning, match=r"'val/los', which was not logged; logged are: train/loss, val/loss"):
        _, trainer = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, monitor="val/los")], max_steps=5)

    assert trainer.global_step == 5
    assert not (tmp_path / "best.ckpt").exists()


def test_without_a_monitor_there_is_no_best(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, monitor=None)], max_steps=5)

    assert names(tmp_path) == ["last.ckpt"]


def test_a_failed_write_leaves_the_earlier_files_and_training_goes_on(small_run, tmp_path):
    class FullFor(small_run.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                self.context = full_disk()
                self.context.__enter__()
            elif trainer.global_step == 5:
                self.context.__exit__(None, None, None)

    checkpoint = RunCheckpoint(tmp_path, every_n_steps=2, monitor=None)
    with pytest.warns(
        UserWarning, match=r"Training goes on at step 4, and the newest whole checkpoint is .*last\.ckpt"
    ):
        _, trainer = small_run.fit(
            tmp_path, callbacks=[FullFor(), checkpoint], plugins=[AtomicCheckpointIO()], max_steps=7
        )

    assert trainer.global_step == 7
    assert names(tmp_path) == ["last.ckpt", "step_000002.ckpt", "step_000006.ckpt"]
    assert checkpoint.state_dict()["kept"] == ["step_000002.ckpt", "step_000006.ckpt"]


class NoMemory:
    """Memory runs out `times` times while the checkpoint of step 4 is gathered, or written."""

    def __init__(self, small_run, monkeypatch, where, times):
        self.left, self.seen = times, []
        save = torch.save

        class Gathers(small_run.Callback):
            def on_save_checkpoint(callback, trainer, *_):  # noqa: N805
                self.step = trainer.global_step
                if where == "gather":
                    self.fail()

        def write(*args, **kwargs):
            if where == "write":
                self.fail()
            return save(*args, **kwargs)

        monkeypatch.setattr(torch, "save", write)
        self.callback = Gathers()

    def fail(self):
        self.seen.append(self.step)
        if self.step == 4 and self.left:
            self.left -= 1
            raise RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB). Tried to allocate 8 bytes.")


@pytest.mark.parametrize("where", ["gather", "write"])
def test_a_save_that_runs_out_of_memory_once_is_made_again(small_run, tmp_path, monkeypatch, where):
    fails = NoMemory(small_run, monkeypatch, where, times=1)
    callbacks = [fails.callback, RunCheckpoint(tmp_path, every_n_steps=2, monitor=None)]
    _, trainer = small_run.fit(tmp_path, callbacks=callbacks, plugins=[AtomicCheckpointIO()], max_steps=6)

    assert trainer.global_step == 6
    assert fails.seen == [2, 4, 4, 6]
    assert names(tmp_path) == ["last.ckpt", "step_000002.ckpt", "step_000004.ckpt", "step_000006.ckpt"]


@pytest.mark.parametrize("where", ["gather", "write"])
def test_a_save_that_has_no_memory_is_left_out_and_training_goes_on(small_run, tmp_path, monkeypatch, where):
    fails = NoMemory(small_run, monkeypatch, where, times=100)
    callbacks = [fails.callback, RunCheckpoint(tmp_path, every_n_steps=2, monitor=None)]
    with pytest.warns(UserWarning, match=r"(?s)MPS backend out of memory.*Training goes on at step 4"):
        _, trainer = small_run.fit(tmp_path, callbacks=callbacks, plugins=[AtomicCheckpointIO()], max_steps=6)

    assert trainer.global_step == 6
    assert names(tmp_path) == ["last.ckpt", "step_000002.ckpt", "step_000006.ckpt"]


def test_another_error_while_a_checkpoint_is_gathered_comes_through_untouched(small_run, tmp_path):
    class Broken(small_run.Callback):
        def on_save_checkpoint(self, *_):
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match=r"^as planned$"):
        small_run.fit(tmp_path, callbacks=[Broken(), RunCheckpoint(tmp_path, every_n_steps=2, monitor=None)])


def test_a_failed_last_write_is_an_error_that_names_what_is_left(small_run, tmp_path):
    class Full(small_run.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                self.context = full_disk()
                self.context.__enter__()

    full = Full()
    with pytest.raises(
        CheckpointError, match=r"(?s)could not write.*ends at step 3, and the newest whole .*last\.ckpt"
    ):
        small_run.fit(
            tmp_path,
            callbacks=[full, RunCheckpoint(tmp_path, every_n_steps=2, monitor=None)],
            plugins=[AtomicCheckpointIO()],
            max_steps=3,
        )
    full.context.__exit__(None, None, None)

    assert names(tmp_path) == ["last.ckpt", "step_000002.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 2


def test_a_state_that_cannot_be_gathered_for_want_of_memory_is_a_failed_write(small_run, tmp_path):
    class Heavy(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            if trainer.global_step == 2:
                raise MemoryError

    with pytest.warns(
        UserWarning, match="memory ran out while the state .* was gathered .* Training goes on at step 2"
    ):
        small_run.fit(
            tmp_path, callbacks=[Heavy(), RunCheckpoint(tmp_path, every_n_steps=1, monitor=None)], max_steps=3
        )

    assert names(tmp_path) == ["last.ckpt", "step_000001.ckpt", "step_000003.ckpt"]


def test_the_first_write_of_a_run_may_fail_too(small_run, tmp_path):
    with (
        full_disk(),
        pytest.warns(UserWarning, match="there is no whole checkpoint yet"),
        pytest.raises(CheckpointError, match="ends at step 3"),
    ):
        small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "c", every_n_steps=2)], max_steps=3)

    assert names(tmp_path / "c") == []


def test_what_a_killed_writer_left_goes_when_the_next_fit_begins(small_run, tmp_path):
    (tmp_path / ".last.ckpt.123.partial").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("stays")
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path, monitor=None)], max_steps=1)

    assert names(tmp_path) == ["last.ckpt", "mine.txt"]


def test_a_trial_run_writes_nothing(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "c")], fast_dev_run=True)

    assert not (tmp_path / "c").exists()


def test_a_strategy_that_writes_folders_is_served_too(small_run, tmp_path):
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class FolderIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            os.makedirs(path)
            super().save_checkpoint(checkpoint, os.path.join(path, "part"), storage_options)

    checkpoint = RunCheckpoint(tmp_path, every_n_steps=2, keep=1, monitor=None)
    small_run.fit(tmp_path, callbacks=[checkpoint], plugins=[FolderIO()], max_steps=6)

    assert names(tmp_path) == ["last.ckpt", "step_000006.ckpt"]
    assert os.path.samefile(tmp_path / "last.ckpt/part", tmp_path / "step_000006.ckpt/part")


def test_the_folder_is_beside_the_logs_unless_given(small_run, tmp_path):
    checkpoint = RunCheckpoint()
    small_run.fit(tmp_path, callbacks=[checkpoint], max_steps=1)

    assert checkpoint.dirpath == tmp_path / "checkpoints"
    assert checkpoint.last_model_path == str(tmp_path / "checkpoints/last.ckpt")


def test_files_hold_nothing_that_torch_would_not_load_from_a_stranger(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(3), RunCheckpoint(tmp_path)], accumulate_grad_batches=2)

    noted = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_unified.continuation"]
    assert {"random", "gradients"} <= set(noted)


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"keep": 0}])
def test_counts_below_one_are_refused(options):
    with pytest.raises(ConfigurationError, match="give a whole number, 1 or more"):
        RunCheckpoint(**options)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match="use 'min' or 'max'"):
        RunCheckpoint(mode="least")
