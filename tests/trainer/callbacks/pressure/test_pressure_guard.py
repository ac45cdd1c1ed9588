"""Under memory pressure a run gives way one rung at a time.

Without pressure the guard changes nothing.
"""

import logging
import os
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_unified.callbacks import GracefulInterrupt, PressureGuard, RunCheckpoint
from lightning_unified.errors import ConfigurationError
from tests.trainer.callbacks.pressure.guards import Scripted, Threaded, actions

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("level", ["normal", "unknown"])
def test_without_pressure_nothing_happens(small_run, tmp_path, level):
    plain, _ = small_run.fit(tmp_path / "a")
    guard = Threaded(level)
    guarded, trainer = small_run.fit(tmp_path / "b", callbacks=[guard])

    assert guard.read > 0
    assert guard.stopped_for is None
    assert trainer.global_step == 12
    assert actions(tmp_path / "b") == []
    assert small_run.same_weights(plain, guarded)


def test_critical_pressure_takes_every_rung_in_turn_and_stops(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert actions(tmp_path) == [
        "noticed",
        "warned",
        "caches cleared",
        "shrink skipped: SingleDeviceStrategy cannot split its batches",
        "checkpoint due at step 3",
        f"stopped at step 4, state in {tmp_path / 'last.ckpt'}",
    ]
    assert guard.stopped_for == "memory pressure: the test says critical"
    assert trainer.global_step == 4
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4
    assert trainer.limit_val_batches == 1.0


def test_a_run_stopped_by_pressure_goes_on_to_where_an_undisturbed_one_ends(small_run, tmp_path, by_hand):
    straight, _ = small_run.fit(tmp_path / "a", callbacks=[RunCheckpoint(tmp_path / "a")])
    small_run.fit(tmp_path / "b", callbacks=[Scripted("critical"), RunCheckpoint(tmp_path / "b")])
    resumed, trainer = small_run.fit(
        tmp_path / "b", callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=tmp_path / "b/last.ckpt"
    )

    assert trainer.global_step == 12
    assert small_run.same_weights(straight, resumed)


def test_the_checkpoint_rung_is_on_the_disk_before_the_next_batch(small_run, tmp_path, by_hand):
    saved = []

    class Notes(Callback):
        def on_train_batch_start(self, *_):
            path = tmp_path / "last.ckpt"
            saved.append(torch.load(path)["global_step"] if path.exists() else None)

    guard = Scripted("critical", stop=False)
    small_run.fit(tmp_path, callbacks=[guard, Notes(), RunCheckpoint(tmp_path, monitor=None)], max_steps=5)

    assert saved == [None, None, None, 3, 3]
    assert actions(tmp_path)[-1] == "checkpoint due at step 3"
    assert guard.stopped_for is None


def test_one_sample_is_not_enough(small_run, tmp_path, by_hand):
    guard = Scripted(*["critical", "normal"] * 12, per_batch=1)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard])

    assert trainer.global_step == 12
    assert actions(tmp_path) == []


def test_a_warning_waits_five_samples_between_rungs_and_never_stops_the_run(small_run, tmp_path, by_hand):
    seen = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(len(actions(tmp_path)))

    guard = Scripted("warn", per_batch=1)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, Notes(), RunCheckpoint(tmp_path)], max_steps=30)

    assert trainer.global_step == 30
    assert guard.stopped_for is None
    # two samples: noticed and warned; five more: caches; five more: the shrink that cannot be, and the checkpoint
    assert [seen.index(count) + 1 for count in (2, 3, 5)] == [2, 7, 12]
    assert seen[-1] == 5


def test_pressure_that_returns_goes_on_where_it_was(small_run, tmp_path, by_hand):
    levels = [*["critical"] * 4, *["normal"] * 6, *["critical"] * 4, "normal"]
    guard = Scripted(*levels, stop=False)
    small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert actions(tmp_path)[:9] == [
        "noticed",
        "warned",
        "caches cleared",
        "over",
        "down to rung 1 of 5",
        "noticed",
        "caches cleared",
        "shrink skipped: SingleDeviceStrategy cannot split its batches",
        f"checkpoint due at step {7}",
    ]


def test_checkpoint_and_stop_wait_for_the_end_of_the_window(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)], accumulate_grad_batches=5)

    assert actions(tmp_path)[-2:] == [
        "checkpoint due at step 1",
        f"stopped at step 2, state in {tmp_path / 'last.ckpt'}",
    ]
    assert trainer.fit_loop.total_batch_idx + 1 == 10


def test_without_run_checkpoint_the_state_is_saved_beside(small_run, tmp_path, by_hand, caplog):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[Scripted("critical")], enable_checkpointing=False)

    assert torch.load(tmp_path / "pressure.ckpt")["global_step"] == 4
    assert f'ckpt_path="{tmp_path / "pressure.ckpt"}"' in caplog.text


def test_a_trial_run_keeps_nothing(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard], fast_dev_run=5)

    assert trainer.global_step == 5
    assert guard.stopped_for is None
    assert list(tmp_path.iterdir()) == []


def test_the_warning_comes_once(small_run, tmp_path, by_hand, caplog):
    levels = [*["warn"] * 2, *["normal"] * 6, *["warn"] * 4, "normal"]
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[Scripted(*levels)])

    assert actions(tmp_path).count("warned") == 2
    assert caplog.text.count("running short of memory") == 1


def test_a_signal_in_the_same_batch_leaves_the_trainer_as_it_was(small_run, tmp_path, by_hand):
    class Kill(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    guard, interrupt = Scripted("critical"), GracefulInterrupt()
    _, trainer = small_run.fit(
        tmp_path, callbacks=[Kill(), guard, interrupt, RunCheckpoint(tmp_path)], min_steps=10, min_epochs=2
    )

    assert guard.stopped_for is not None
    assert interrupt.signal is signal.SIGTERM
    assert (trainer.global_step, trainer.min_steps, trainer.min_epochs, trainer.limit_val_batches) == (4, 10, 2, 1.0)


def test_an_unwritable_trace_is_said_once_and_the_run_still_gives_way(small_run, tmp_path, by_hand, caplog):
    (tmp_path / "file").write_text("in the way")
    guard = Scripted("critical", trace=tmp_path / "file" / "pressure.jsonl")
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert guard.stopped_for is not None
    assert caplog.text.count("no longer written") == 1


@pytest.mark.parametrize("options", [{"every_s": 0}, {"samples": 0}, {"every_s": float("nan")}])
def test_arguments_out_of_range_are_refused(options):
    assert PressureGuard(every_s=0.1, samples=1).stopped_for is None
    with pytest.raises(ConfigurationError, match=r"every_s=.*give seconds, more than 0|samples=.*1 or more"):
        PressureGuard(**options)
