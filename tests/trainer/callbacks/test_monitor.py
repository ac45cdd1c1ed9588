"""Memory figures go to the loggers as they are read; what is unknown is not logged."""

import gc

import pytest
import torch

from lightning_unified.callbacks import MemoryMonitor
from lightning_unified.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows:
    def __new__(cls):
        from lightning.pytorch.loggers.logger import DummyLogger

        logger = DummyLogger()
        logger.rows = []
        logger.log_metrics = lambda metrics, step=None: logger.rows.append((step, dict(metrics)))
        return logger


def watch(small_run, folder, monitor, **options):
    logger = Rows()
    _, trainer = small_run.build(folder, callbacks=[monitor], logger=logger, log_every_n_steps=1000, **options)
    module = small_run.SmallModule()
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())
    return [(step, row) for step, row in logger.rows if any(name.startswith("memory/") for name in row)]


def monitor_of(read, **options):
    class Injected(MemoryMonitor):
        def read(self, device):
            return read(device)

    return Injected(**options)


def test_figures_are_logged_every_n_batches_in_bytes(small_run, tmp_path, reading):
    fake = reading(total=100, available=60, allocated=30, reserved=40, peak=35)
    rows = watch(small_run, tmp_path, monitor_of(lambda _: fake, every_n_batches=5), max_steps=12)

    expected = {"memory/allocated": 30, "memory/reserved": 40, "memory/peak": 35, "memory/available": 60}
    assert rows == [(4, expected), (9, expected)]


def test_unknown_figures_are_not_logged(small_run, tmp_path, reading):
    monitor = monitor_of(lambda _: reading(available=60), every_n_batches=5)
    rows = watch(small_run, tmp_path, monitor, max_steps=5)

    assert rows == [(4, {"memory/available": 60})]
    assert monitor.peak is None


def test_the_backends_peak_is_taken_with_its_source(small_run, tmp_path, reading):
    monitor = monitor_of(lambda _: reading(allocated=50, peak=35))
    watch(small_run, tmp_path, monitor, max_steps=1)

    assert (monitor.peak, monitor.peak_source) == (35, "fake peak")


def test_without_one_the_greatest_sample_is_the_peak_and_called_so(small_run, tmp_path, reading):
    values = iter([10, 70, 20, 30, 40, 50, 60])
    monitor = monitor_of(lambda _: reading(allocated=next(values, 5)), every_n_batches=1)
    rows = watch(small_run, tmp_path, monitor, max_steps=1)

    assert (monitor.peak, monitor.peak_source) == (70, "sampled: greatest fake allocated seen")
    assert rows[0][1]["memory/peak_sampled"] == 70
    assert "memory/peak" not in rows[0][1]


def test_samples_are_taken_where_memory_is_highest(small_run, tmp_path, reading):
    monitor = monitor_of(lambda _: (moments.append(1), reading(allocated=1))[1], every_n_batches=100)
    moments = []
    watch(small_run, tmp_path, monitor, max_steps=2)

    # start, then before backward, before the optimizer and after each of two batches, end
    assert len(moments) == 1 + 2 * 3 + 1


def test_a_backend_with_a_peak_is_read_only_when_it_is_logged(small_run, tmp_path, reading):
    monitor = monitor_of(lambda _: (moments.append(1), reading(allocated=1, peak=2))[1], every_n_batches=3)
    moments = []
    watch(small_run, tmp_path, monitor, max_steps=6)

    assert len(moments) == 1 + 2 + 1


def test_the_micro_batch_size_is_logged_where_the_strategy_has_one(small_run, tmp_path, reading):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Micro(SingleDeviceStrategy):
        micro_batch_size = 4

    monitor = monitor_of(lambda _: reading(), every_n_batches=1)
    rows = watch(small_run, tmp_path, monitor, max_steps=1, strategy=Micro("cpu"))

    assert rows == [(0, {"memory/micro_batch_size": 4})]


def test_monitoring_frees_and_waits_for_nothing(small_run, tmp_path, monkeypatch, reading):
    for owner, name in ((gc, "collect"), (torch.cuda, "synchronize"), (torch.cuda, "empty_cache")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"called {name}"))
    monitor = monitor_of(lambda _: reading(allocated=1), every_n_batches=1)
    trainer = small_run.build(tmp_path, callbacks=[monitor], max_steps=2)[1]
    for hook in ("on_before_backward", "on_before_optimizer_step"):
        getattr(monitor, hook)(trainer, None, None)

    assert monitor.peak == 1


def test_the_real_reading_of_this_machine_is_logged(small_run, tmp_path):
    rows = watch(small_run, tmp_path, MemoryMonitor(every_n_batches=1), max_steps=1)

    assert rows[0][1]["memory/allocated"] > 1_000_000
    assert rows[0][1]["memory/peak"] >= rows[0][1]["memory/allocated"] * 0.5
    assert "memory/reserved" not in rows[0][1]


def test_it_works_without_a_logger(small_run, tmp_path, reading):
    monitor = monitor_of(lambda _: reading(allocated=7), every_n_batches=1)
    small_run.fit(tmp_path, callbacks=[monitor], max_steps=2)

    assert monitor.peak == 7


def test_an_interval_below_one_is_refused():
    with pytest.raises(ConfigurationError, match="every_n_batches=0: give a whole number, 1 or more"):
        MemoryMonitor(every_n_batches=0)
