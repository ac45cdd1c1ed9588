"""The bar shows memory and the micro-batch size, and pays for a reading once a second."""

from types import SimpleNamespace

import pytest

from lightning_unified.callbacks import MemoryProgressBar, RichMemoryProgressBar
from lightning_unified.units import GIB

pytestmark = pytest.mark.filterwarnings("ignore")


def columns(small_run, folder, bar, **strategy):
    module, trainer = small_run.fit(folder, max_steps=1)
    for name, value in strategy.items():
        setattr(trainer.strategy, name, value)
    return bar.get_metrics(trainer, module)


def bar_of(read, kind=MemoryProgressBar, clock=lambda: 0.0):
    class Injected(kind):
        def read(self, device):
            return read(device)

        def now(self):
            return clock()

    return Injected()


@pytest.mark.parametrize("kind", [MemoryProgressBar, RichMemoryProgressBar])
def test_memory_is_shown_against_the_budget_with_the_micro_batch_size(small_run, tmp_path, reading, kind):
    bar = bar_of(lambda _: reading(allocated=int(1.2 * GIB), total=16 * GIB), kind)
    shown = columns(small_run, tmp_path, bar, budget=SimpleNamespace(bytes=4 * GIB), micro_batch_size=4)

    assert (shown["mem"], shown["micro"]) == ("1.2/4.0 GiB", "4")


def test_without_a_budget_it_is_shown_against_the_pool(small_run, tmp_path, reading):
    shown = columns(small_run, tmp_path, bar_of(lambda _: reading(allocated=GIB, total=16 * GIB)))

    assert shown["mem"] == "1.0/16.0 GiB"
    assert "micro" not in shown


def test_without_either_it_is_shown_alone(small_run, tmp_path, reading):
    assert columns(small_run, tmp_path, bar_of(lambda _: reading(allocated=GIB)))["mem"] == "1.0 GiB"


def test_unknown_memory_is_not_shown(small_run, tmp_path, reading):
    assert "mem" not in columns(small_run, tmp_path, bar_of(lambda _: reading(total=GIB)))


def test_the_modules_own_metrics_stay(small_run, tmp_path, reading):
    module, trainer = small_run.fit(tmp_path, max_steps=1)
    trainer.progress_bar_metrics["loss"] = 0.5
    bar = bar_of(lambda _: reading(allocated=GIB))

    assert bar.get_metrics(trainer, module)["loss"] == 0.5


def test_a_reading_is_used_for_a_second(small_run, tmp_path, reading):
    times = iter([0.0, 0.5, 0.9, 1.1, 1.5])
    reads = []
    bar = bar_of(lambda _: (reads.append(1), reading(allocated=GIB))[1], clock=lambda: next(times))
    module, trainer = small_run.fit(tmp_path, max_steps=1)
    for _ in range(5):
        bar.get_metrics(trainer, module)

    assert len(reads) == 2


@pytest.mark.parametrize("kind", [MemoryProgressBar, RichMemoryProgressBar])
def test_a_run_prints_the_column(small_run, tmp_path, capsys, kind):
    small_run.fit(tmp_path, callbacks=[kind()], enable_progress_bar=True, max_steps=3)

    assert "GiB" in capsys.readouterr().out
