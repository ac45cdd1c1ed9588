"""The bar shows memory and the micro-batch size, and pays for a reading once a second."""

import io
import itertools
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_unified.callbacks import MemoryProgressBar, PressureGuard, RichMemoryProgressBar
from lightning_unified.callbacks.progress.lines import ProgressLines, progress_line
from lightning_unified.terminal import labelled
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, small_run, folder, reading, stream, clock):
    """Return what a run of six steps writes to `stream`, each step as long as `clock` says."""
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    bar = bar_of(lambda _: reading(allocated=GIB), clock=clock)
    small_run.fit(folder, callbacks=[bar], enable_progress_bar=True, max_steps=6)
    return stream.getvalue()


def test_a_slow_step_is_shown_in_seconds_per_iteration():
    slow, quick = (
        Tqdm.format_meter(n=n, total=10, elapsed=190.0, bar_format=MemoryProgressBar.BAR_FORMAT, ncols=80)
        for n in (2, 380)
    )

    assert "95.00s/it" in slow and "2.00it/s" in quick


def test_a_slow_step_is_shown_in_seconds_by_the_rich_bar_too(small_run, tmp_path):
    _, trainer = small_run.fit(tmp_path, max_steps=1)
    bar = RichMemoryProgressBar()
    (speed,) = [column for column in bar.configure_columns(trainer) if hasattr(column, "style")][-1:]

    assert str(speed.render(SimpleNamespace(speed=0.0105))) == "95.24s/it"
    assert str(speed.render(SimpleNamespace(speed=2.0))) == "2.00it/s"


def test_a_bar_is_drawn_ten_times_a_second_at_most_and_after_the_last_batch():
    times = iter([0.0, 0.02, 0.09, 0.11, 0.15])
    bar = bar_of(None, clock=lambda: next(times))

    assert [bar._should_update(n, 5) for n in (1, 2, 3, 4, 5)] == [True, False, False, True, True]


def test_a_bar_is_drawn_anew_within_a_second_of_slow_batches():
    times = iter([0.0, 0.4, 1.2])
    bar = bar_of(None, clock=lambda: next(times))
    bar._refresh_rate = 50

    assert [bar._should_update(n, 1000) for n in (1, 2, 3)] == [True, False, True]


def test_without_a_terminal_lines_are_written_instead_of_a_bar(monkeypatch, small_run, tmp_path, reading):
    clock = itertools.count(0.0, 4.0)
    out = drawn(monkeypatch, small_run, tmp_path, reading, io.StringIO(), lambda: next(clock))
    steps = [line for line in out.splitlines() if line.startswith("step ")]

    assert "\r" not in out and "\x1b" not in out
    assert steps[0].startswith("step 1 of 6 (17 %)") and steps[-1].startswith("step 6 of 6 (100 %)")
    assert 2 < len(steps) <= 6
    assert "/step, " in steps[1] and " left" in steps[1] and "mem=1.0 GiB" in steps[1]


def test_on_a_terminal_a_bar_is_drawn_and_no_line(monkeypatch, small_run, tmp_path, reading):
    out = drawn(monkeypatch, small_run, tmp_path, reading, Terminal(), lambda: 0.0)

    assert "\rEpoch 0" in out and "step 1 of" not in out


def test_several_runs_on_one_terminal_write_lines_with_their_names(monkeypatch, small_run, tmp_path, reading):
    with labelled("model.width=8"):
        out = drawn(monkeypatch, small_run, tmp_path, reading, Terminal(), lambda: 0.0)

    assert "\r" not in out
    assert out.startswith("[model.width=8] step 1 of 6")


def test_lines_become_rarer_with_time_and_the_last_step_has_one():
    lines = ProgressLines(step=50, now=0.0)
    due = [step for step in range(51, 100_001) if lines.due(step, total=100_000, now=float(step - 50))]

    assert due[:3] == [51, 61, 71]
    assert due[-1] == 100_000
    assert len(due) < 400
    assert lines.line(total=100_000, now=99_950.0, metrics={}) == "step 100,000 of 100,000 (100 %), 1 s/step"


def test_a_run_without_an_end_has_no_time_left():
    line = progress_line(7, total=float("inf"), seconds_per_step=2.0, metrics={"loss": 2.31234, "v_num": 3})

    assert line == "step 7, 2 s/step, loss=2.312"


def test_the_level_of_memory_pressure_is_shown(small_run, tmp_path, reading):
    module, trainer = small_run.fit(tmp_path, max_steps=1, callbacks=[guard := PressureGuard()])
    bar = bar_of(lambda _: reading(allocated=GIB))
    assert "pressure" not in bar.get_metrics(trainer, module)
    guard._watch = SimpleNamespace(verdict=SimpleNamespace(pressure=SimpleNamespace(level="warn")), end=lambda: None)

    assert bar_of(lambda _: reading(allocated=GIB)).get_metrics(trainer, module)["pressure"] == "warn"


def test_a_modules_print_is_shown_without_a_terminal(capsys):
    MemoryProgressBar().print("said", 3)

    assert capsys.readouterr().out == "said 3\n"
