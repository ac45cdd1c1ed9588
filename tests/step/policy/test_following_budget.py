"""A run under `leave 6GiB` while other programs come and go.

Budget, cap and micro-batch size follow, and no step fails.
"""

from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified import UnifiedStrategy
from lightning_unified.hardware import Cap, Figure, Reading, Sources, resolve_budget
from lightning_unified.precision import Platform
from lightning_unified.step.recovery import budget_watch
from lightning_unified.step.recovery.budget_watch import BudgetWatch

GIB = 2**30
UNKNOWN = Figure(None, "unknown")


class Machine:
    """A pool of 32 GiB and an allocator, with figures in GiB set by hand.

    They are read anew after every batch.
    """

    def __init__(self, monkeypatch, *, device="cuda:0", peak=8.0):
        self.available, self.allocated, self.reserved, self.peak = 24.0, 2.0, 8.0, peak
        self.caps, self.released, self.device = [], 0, device
        monkeypatch.setattr("lightning_unified.hardware.budget._EVERY_S", 0)
        monkeypatch.setattr(budget_watch, "read", lambda _: self.reading())
        monkeypatch.setattr(budget_watch, "read_peak", lambda _: self.reading().peak)
        monkeypatch.setattr(budget_watch, "reset_peak", lambda _: self.reset())
        monkeypatch.setattr(budget_watch, "cap_allocator", lambda _, budget: self.cap(budget))
        monkeypatch.setattr(budget_watch, "release_cached_memory", lambda _: self.release())

    def reading(self):
        figures = {
            name: UNKNOWN if (count := getattr(self, name)) is None else Figure(int(count * GIB), name)
            for name in ("available", "allocated", "reserved", "peak")
        }
        return Reading(
            device=self.device, backend="cuda", name="", pool="unified", total=Figure(32 * GIB, "total"), **figures
        )

    def cap(self, budget):
        self.caps.append(budget.bytes / GIB)
        return Cap(applied=True, fraction=None, bytes=budget.bytes, reason="made up")

    def release(self):
        self.released += 1

    def reset(self):
        self.peak = self.allocated
        return True

    def watch(self):
        watch = BudgetWatch("leave 6GiB")
        watch.device = torch.device(self.device)
        watch.resolve()
        watch._follower = budget_watch.BudgetFollower(watch.budget)
        return watch


def test_a_fall_lowers_the_cap_and_gives_caches_back_at_once(monkeypatch):
    machine = Machine(monkeypatch)
    watch = machine.watch()
    machine.available = 14.0
    said = [watch.follow(), watch.follow()]

    assert said[0] is None
    assert said[1].startswith("the budget fell from 20.00 GiB to 10.00 GiB: 16.00 GiB is available")
    assert (machine.caps, machine.released, watch.bytes) == ([20, 10], 1, 10 * GIB)
    assert watch.overrun() is None


def test_a_peak_above_the_new_budget_asks_for_less_and_the_cap_waits_for_it(monkeypatch):
    machine = Machine(monkeypatch, peak=15.0)
    watch = machine.watch()
    machine.available = 14.0
    watch.follow(), watch.follow()
    asked, waiting = watch.overrun(), list(machine.caps)
    watch.count_anew()
    machine.peak = 7.0
    watch.follow()

    assert asked == "peak 15.00 GiB above the budget of 10.00 GiB"
    assert (waiting, machine.caps) == ([20, 15], [20, 15, 10])
    assert watch.overrun() is None


def test_a_rise_raises_the_cap_and_clears_nothing(monkeypatch):
    machine = Machine(monkeypatch)
    watch = machine.watch()
    machine.available = 29.0
    watch.follow()

    assert watch.follow().startswith("the budget rose from 20.00 GiB to 25.00 GiB")
    assert (machine.caps, machine.released) == ([20, 25], 0)


def test_without_a_peak_counter_what_is_held_stands_for_it(monkeypatch):
    machine = Machine(monkeypatch, peak=None)
    watch = machine.watch()
    machine.available, machine.reserved = 14.0, 12.0
    watch.follow(), watch.follow()

    assert watch.overrun() == "peak 12.00 GiB above the budget of 10.00 GiB"


def test_code_that_ran_for_the_first_time_is_not_held_against_a_budget_on_a_cpu(tmp_path):
    status = tmp_path / "self" / "status"
    status.parent.mkdir()

    def holds(*, peak, files):
        status.write_text(f"VmHWM:\t{peak * 1024} kB\nRssFile:\t{files * 1024} kB\n")

    watch = BudgetWatch("500MiB")
    watch._elsewhere = {"sources": replace(Sources.live(), proc=tmp_path)}
    watch.budget = resolve_budget(
        "500MiB", Machine.reading(SimpleNamespace(available=1, allocated=0, reserved=0, peak=0, device="cpu"))
    )
    holds(peak=300, files=20)
    watch.begin()
    holds(peak=530, files=60)
    with_code = watch.overrun()
    holds(peak=514, files=30)
    a_little_above = watch.overrun()
    holds(peak=530, files=30)

    assert (with_code, a_little_above) == (None, None)
    assert watch.overrun() == "peak 530.00 MiB above the budget of 500.00 MiB"


def test_a_budget_that_is_an_amount_is_not_read_again(monkeypatch):
    machine = Machine(monkeypatch)
    watch = machine.watch()
    watch._follower.budget = replace(watch.budget, follows_others=False)
    machine.available = 1.0

    assert [watch.follow() for _ in range(3)] == [None] * 3
    assert machine.caps == [20]


class OtherPrograms(L.Callback):
    """Takes 10 GiB after the third batch and gives it back after the tenth."""

    def __init__(self, machine):
        self.machine, self.sizes, self.budgets = machine, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.sizes.append(trainer.strategy.micro_batch_size)
        self.budgets.append(trainer.strategy.budget.bytes / GIB)
        self.machine.available = 14.0 if 3 <= batch_idx < 10 else 24.0
        self.machine.peak = 2.0 + 0.75 * trainer.strategy.micro_batch_size


def test_a_run_releases_memory_for_other_programs_and_takes_it_back(monkeypatch):
    """Without any callback of this package: the strategy follows by itself."""
    machine = Machine(monkeypatch, device="cpu", peak=14.0)
    others, strategy = OtherPrograms(machine), UnifiedStrategy(budget="leave 6GiB")
    trainer = L.Trainer(
        strategy=strategy, callbacks=[others], max_steps=44, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.randn(44 * 16, 32), batch_size=16))

    assert others.sizes == [16] * 5 + [8] * 32 + [16] * 7
    assert others.budgets == [20] * 5 + [10] * 7 + [20] * 32
    assert strategy.recoveries == 0
    assert [event.partition(":")[0] for event in strategy.events] == [
        "the budget fell from 20.00 GiB to 10.00 GiB",
        "peak 14.00 GiB above the budget of 10.00 GiB; micro-batches of 8 rows from here on",
        "the budget rose from 10.00 GiB to 20.00 GiB",
        "more memory is available than when it ran out; micro-batches of 16 rows from here on",
    ]
    assert strategy.plan.budget_bytes == 20 * GIB
    assert "larger again" in strategy.plan.reasons["micro_batch_size"]


def test_the_cap_is_set_before_the_model_moves_to_the_device(monkeypatch):
    """Hosts that hang instead of raising must not be asked for anything first."""
    order = []
    capped, moved = budget_watch.cap_allocator, UnifiedStrategy.model_to_device
    monkeypatch.setattr(budget_watch, "cap_allocator", lambda *a: order.append("cap") or capped(*a))
    monkeypatch.setattr(UnifiedStrategy, "model_to_device", lambda self: order.append("move") or moved(self))
    L.Trainer(
        strategy=UnifiedStrategy(budget="8GiB"), max_steps=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(BoringModel())  # fmt: skip

    assert order == ["cap", "move"]


@pytest.mark.parametrize("device", ["mps", "cuda:0"])
def test_the_allocators_settings_are_written_before_the_device_is_asked_anything(monkeypatch, device):
    """To read an Apple GPU makes Metal's allocator, which freezes both watermark ratios."""
    order = []
    note = Cap(applied=True, fraction=None, bytes=None, reason="written")
    monkeypatch.setattr(budget_watch, "prepare_allocators", lambda spec: order.append(spec) or note)
    platform = Platform(backend="cuda", native_bf16=False)
    monkeypatch.setattr(
        "lightning_unified.strategies.base.platform_of", lambda device: order.append("asked") or platform
    )
    strategy = UnifiedStrategy(budget="leave 6GiB", precision="auto")
    strategy.parallel_devices = [torch.device(device)]

    assert order == ["leave 6GiB", "asked"]
    assert strategy.policy.watch.written is note
