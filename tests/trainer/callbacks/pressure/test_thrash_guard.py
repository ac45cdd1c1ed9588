"""Slow steps beside moving memory are reported as thrashing once.

The run then gives way as under critical pressure.
"""

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_unified.callbacks import PressureGuard, RunCheckpoint
from lightning_unified.callbacks.pressure.thrash_watch import ThrashWatch
from lightning_unified.callbacks.pressure.watch import PressureWatch
from lightning_unified.hardware import Budget, Figure, Pressure
from lightning_unified.nn.cuda_graphs import RecordedCalls

pytestmark = pytest.mark.filterwarnings("ignore")

GIB = 2**30
CALM = Pressure(
    level="normal",
    available=Figure(GIB, "made up"),
    swap_out_bytes_per_s=0.0,
    stall_share=None,
    reasons=(),
    decompressed_bytes_per_s=None,
)
BUSY = replace(CALM, swap_out_bytes_per_s=8.0 * 2**20)  # half of what would be a warning in itself


class Slow(PressureGuard):
    """Batches take one second, but 226 from `slow_from` to `slow_to`.

    The machine reports no pressure, in two samples a batch.
    """

    def __init__(self, *, slow_from, slow_to=10**6, flow=BUSY, **options):
        super().__init__(**options)
        self.slow_from, self.slow_to, self.flow = slow_from, slow_to, flow
        self.batches = self.now = 0

    @property
    def slow(self):
        return self.slow_from <= self.batches < self.slow_to

    def reader(self):
        return lambda: self.flow if self.slow else CALM

    def thrash_watch(self):
        return ThrashWatch(clock=lambda: self.now)

    def on_train_batch_end(self, *arguments):
        self.now += 226 if self.slow else 1
        for _ in range(2):
            self._watch.sample()
        super().on_train_batch_end(*arguments)
        self.batches += 1


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    """Samples come from the test, not from a thread."""
    monkeypatch.setattr(PressureWatch, "start", lambda self: None)


def lines(folder):
    path = folder / "pressure.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_that_thrashes_reports_it_once_and_releases_memory(small_run, tmp_path, caplog):
    guard = Slow(slow_from=10)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        _, trainer = small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)], max_steps=40)
    messages = [record.getMessage() for record in caplog.records if "hrashing" in record.getMessage()]
    named = [text for text in messages if text.startswith("Thrashing")]

    assert len(named) == 1
    assert re.match(r"Thrashing: steps take 3 min 46 s that took 1 s, while 8\.00 MiB a second go to swap", named[0])
    assert "What helps: closing other programs" in named[0]
    assert "running short of memory" not in caplog.text
    assert guard.stopped_for.startswith("memory pressure: thrashing: steps take 3 min 46 s")
    assert {line["level"] for line in lines(tmp_path)} == {"critical"}
    assert [line["action"].split()[0] for line in lines(tmp_path)] == [
        "noticed", "warned", "caches", "shrink", "checkpoint", "stopped",
    ]  # fmt: skip
    assert 12 < trainer.global_step < 20


def test_steps_that_are_quick_again_lead_down(small_run, tmp_path):
    guard = Slow(slow_from=10, slow_to=15, stop=False)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard], max_steps=40)

    assert trainer.global_step == 40
    assert [line["action"] for line in lines(tmp_path)][:5] == [
        "noticed", "warned", "caches cleared", "over", "down to rung 1 of 5",
    ]  # fmt: skip


def test_slow_steps_on_a_calm_machine_are_none_of_its_business(small_run, tmp_path):
    guard = Slow(slow_from=10, flow=CALM)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard], max_steps=30)

    assert trainer.global_step == 30
    assert lines(tmp_path) == []


def test_time_between_batches_does_not_count(small_run, tmp_path):
    """Validation, checkpoints and waiting for data take time between two batches."""
    guard = Slow(slow_from=10**6)

    class Waits(Callback):
        def on_validation_end(self, *_):
            guard.now += 1000

        def on_train_batch_end(self, *_):
            guard.now += 1000 if guard.batches > 9 else 0

    guard.reader = lambda: lambda: BUSY if guard.batches > 9 else CALM
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, Waits()], max_steps=30)

    assert trainer.global_step == 30
    assert lines(tmp_path) == []


def fake_trainer(device="cpu", module=None, **strategy):
    strategy = SimpleNamespace(root_device=torch.device(device), **strategy)
    return SimpleNamespace(strategy=strategy, lightning_module=module or torch.nn.Linear(4, 4))


def thrashes_by_the_gap(reading, module):
    """Return the finding for each of twelve batches.

    From the tenth on the driver holds 72 GiB, of which 6.7 are live.
    """
    now, held = [0.0], [8 * GIB]
    watch = ThrashWatch(
        clock=lambda: now[0],
        read=lambda _: reading(total=48 * GIB, allocated=6 * GIB, peak=7 * GIB, reserved=held[0]),
    )
    budget = Budget(bytes=40 * GIB, spec="40GiB", reason="", follows_others=False)
    found = []
    for index in range(12):
        held[0] = 72 * GIB if index > 8 else 8 * GIB
        watch.began()
        now[0] += 12 if index > 8 else 1
        found.append(watch.ended(fake_trainer("mps", module, budget=budget), torch.zeros(4, 4), CALM))
    return found


def test_what_the_driver_holds_is_measured_against_the_budget(reading):
    """Named although the system says nothing."""
    found = thrashes_by_the_gap(reading, torch.nn.Linear(4, 4))

    assert found[:11] == [None] * 11
    assert found[11].gap_bytes == 65 * GIB


def test_recordings_hold_what_no_tensor_is_seen_in(reading):
    module = torch.nn.Linear(4, 4)
    recorded = RecordedCalls(module)

    assert thrashes_by_the_gap(reading, module) == [None] * 12
    recorded.remove()
    assert thrashes_by_the_gap(reading, module)[11] is not None


def test_a_cpu_is_not_read_for_a_gap():
    watch = ThrashWatch(read=lambda _: pytest.fail("was read"))
    watch.began()

    assert watch.ended(fake_trainer(), torch.zeros(2), CALM) is None


def test_the_trace_records_a_budget_that_followed_other_programs(small_run, tmp_path, monkeypatch):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Following(SingleDeviceStrategy):
        felt = None

        @property
        def budget(self):
            late = self.lightning_module.trainer.global_step >= 6
            return self.later if late else self.first

        def feel_pressure(self, pressed):
            self.felt = pressed

    strategy = Following("cpu")
    strategy.first = Budget(bytes=9 * GIB, spec="leave 6GiB", reason="at first", follows_others=True)
    strategy.later = replace(strategy.first, bytes=5 * GIB, reason="others came")
    small_run.fit(tmp_path, callbacks=[Slow(slow_from=10**6)], strategy=strategy)

    assert [line["action"] for line in lines(tmp_path)] == ["budget now 5.00 GiB: others came"]
    assert strategy.felt is False


@pytest.mark.parametrize(("pool", "expected"), [("unified", True), ("dedicated", False)])
def test_a_gpu_in_the_hosts_memory_is_watched_as_one(reading, monkeypatch, pool, expected):
    seen = {}
    monkeypatch.setattr(
        "lightning_unified.callbacks.pressure.guard.read", lambda _: replace(reading(), backend="cuda", pool=pool)
    )
    monkeypatch.setattr(
        "lightning_unified.callbacks.pressure.guard.PressureReader",
        lambda sources, one_pool: seen.update(one_pool=one_pool) or SimpleNamespace(read=lambda now: CALM),
    )
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)), default_root_dir=".", is_global_zero=False
    )
    PressureGuard().on_train_start(trainer, None)

    assert seen == {"one_pool": expected}
