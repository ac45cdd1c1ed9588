"""Pins the private state of Lightning's loop that the callbacks read.

Lightning then behaves as this state says.
"""

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_unified.callbacks import loops

pytestmark = pytest.mark.filterwarnings("ignore")


class Asks(Callback):
    def __init__(self):
        self.due, self.validated, self.open, self.stops, self.logged = [], [], [], [], []

    def on_train_batch_end(self, trainer, *_):
        self.due.append(loops.validation_is_due(trainer))
        self.open.append(loops.window_is_open(trainer))
        self.stops.append(loops.will_stop(trainer))
        self.logged.append(loops.logged_step(trainer))
        self.validated.append(False)

    def on_validation_end(self, trainer, *_):
        self.complete = loops.validation_is_complete(trainer)
        self.validated[-1] = True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 2},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
        {"limit_val_batches": 0},
        {"limit_train_batches": 3},
    ],
    ids=str,
)
def test_validation_is_due_where_it_then_runs(small_run, tmp_path, options):
    asks = Asks()
    small_run.fit(tmp_path, callbacks=[asks], **options)

    assert len(asks.due) == 12
    assert asks.due == asks.validated


def test_a_window_is_open_until_its_last_batch_or_the_epochs(small_run, tmp_path):
    asks = Asks()
    small_run.fit(tmp_path, callbacks=[asks], max_steps=6, accumulate_grad_batches=2)

    assert asks.open == [True, False, True, False, False] * 2


def test_a_run_will_stop_at_its_last_step_only(small_run, tmp_path):
    asks = Asks()
    small_run.fit(tmp_path, callbacks=[asks], max_steps=4)

    assert asks.stops == [False, False, False, True]


@pytest.mark.parametrize(("minimum", "stops"), [(None, [False, True]), (4, [False, False, False, True])])
def test_a_stop_waits_for_the_minimum_of_steps(small_run, tmp_path, minimum, stops):
    asks = Asks()
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(2), asks], min_steps=minimum, min_epochs=0)

    # with a minimum Lightning trains on, and the flag stays set
    assert asks.stops == stops


def test_rows_are_logged_under_lightnings_own_step(small_run, tmp_path):
    from lightning.pytorch.loggers.logger import DummyLogger

    logger, asks = DummyLogger(), Asks()
    steps = []
    logger.log_metrics = lambda metrics, step=None: steps.append(step) if "train/loss" in metrics else None
    small_run.fit(tmp_path, callbacks=[asks], logger=logger, log_every_n_steps=1, max_steps=6)

    assert steps == asks.logged


def test_a_validation_that_saw_all_its_batches_is_complete(small_run, tmp_path):
    asks = Asks()
    small_run.fit(tmp_path, callbacks=[asks], max_steps=5)

    assert asks.complete


def test_a_validation_that_was_called_off_is_not_and_logs_nothing(small_run, tmp_path):
    class Leaves(Callback):
        def on_validation_batch_end(self, trainer, *_):
            loops.call_off_validation(trainer)

    asks = Asks()
    module, trainer = small_run.fit(tmp_path, callbacks=[asks, Leaves()], max_steps=5)

    assert not asks.complete
    assert module.validations == 1
    assert "val/loss" not in trainer.callback_metrics
