"""Memory that a module keeps on the device between steps.

It stays within the plan's remainder, and is released where memory is short.
"""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.step.recovery.cache_care import CacheCare
from lightning_unified.units import GIB, MIB
from tests.support.lasting import Lasting
from tests.support.modules.plain import fit

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
LONG = (1000, 1000, 1000)  # 2 MB of a batch, and a few times that of a step


class Keeps(L.LightningModule):
    """Keeps a number of bytes from each batch on while memory is spare.

    Its step number `fails_at` runs out of memory once.
    """

    kept_bytes = 0
    fails_at = Lasting(None)

    def __init__(self, wanted, *, fails_at=None, phase="forward"):
        super().__init__()
        self.layer, self.wanted, self.spare, self.given_back = torch.nn.Linear(64, 64), wanted, [], []
        self.fails_at, self.phase = fails_at, phase

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=self.keep)

    def keep(self, batch):
        self.fail("prepare")
        spare = getattr(self.trainer.strategy, "spare_bytes", None)
        self.spare.append(spare)
        self.kept_bytes = self.wanted if spare else 0
        return batch

    def give_back(self):
        self.given_back.append(self.trainer.global_step)
        self.kept_bytes = 0

    def fail(self, phase):
        if phase == self.phase and self.global_step == self.fails_at:
            self.fails_at = None
            raise RuntimeError(TEXT)

    def training_step(self, batch, batch_idx):
        self.fail("forward")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def run(module, *, lengths=(4, 4, 4, 4), **options):
    strategy = UnifiedStrategy(simulate="rtx3060-12gb", budget="64MiB", **options)
    fit(
        module,
        DataLoader([torch.ones(8, length, 64) for length in lengths], batch_size=None),
        strategy=strategy,
        max_epochs=1,
    )
    return strategy


def test_all_is_spare_before_a_plan_and_then_what_the_steps_leave_of_the_budget():
    module = Keeps(0)
    strategy = run(module)

    assert module.spare == [64 * MIB, *[64 * MIB - strategy.plan.prediction.reserved_bytes] * 3]
    assert module.given_back == []


def test_without_plans_or_repeated_steps_nobody_knows_what_is_spare():
    for option in ("predict", "recover"):
        module = Keeps(5 * MIB)
        run(module, **{option: False})

        assert module.spare == [None] * 4


def test_what_is_kept_is_beside_the_step_in_the_predicted_peak():
    calm, module = run(Keeps(0)), Keeps(5 * MIB)
    strategy = run(module)

    assert strategy.plan.predicted_peak_bytes == calm.plan.predicted_peak_bytes + 5 * MIB
    assert module.given_back == [0]  # while the step was planned


@pytest.mark.slow
def test_a_step_is_planned_around_what_is_kept():
    calm, tight = Keeps(0), Keeps(30 * MIB)
    whole, cut = run(calm, lengths=LONG), run(tight, lengths=LONG)

    assert whole.micro_batch_size == 8
    assert cut.micro_batch_size < 8
    assert cut.recoveries == 0
    assert tight.spare[-1] >= 30 * MIB


def test_a_step_that_has_no_room_beside_what_is_kept_goes_before_it():
    module = Keeps(50 * MIB)
    strategy = run(module, lengths=LONG)

    assert strategy.micro_batch_size == 8
    assert module.given_back == [0]
    assert module.spare[1] < 50 * MIB


def test_memory_that_runs_out_takes_back_what_is_kept_for_good():
    module = Keeps(5 * MIB, fails_at=2)
    strategy = run(module)

    assert strategy.recoveries == 1
    assert module.given_back == [0, 2]
    assert module.spare[3] == 0
    assert module.kept_bytes == 0


def test_memory_that_runs_out_while_it_is_made_takes_it_back_until_then():
    module = Keeps(5 * MIB, fails_at=2, phase="prepare")
    strategy = run(module)

    assert strategy.recoveries == 1
    assert module.given_back == [0, 2]
    assert module.kept_bytes == 5 * MIB


def test_a_smaller_micro_batch_takes_it_back_as_well():
    module = Keeps(5 * MIB)

    strategy = run(module)
    module.kept_bytes = 5 * MIB
    strategy.shrink("pressure")

    assert strategy.spare_bytes == 0
    assert module.kept_bytes == 0


def test_caches_are_not_looked_after_while_calls_may_be_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(RecordedCalls, "_record", lambda _: False)  # there is no CUDA
    looked, module = [], Keeps(0)
    monkeypatch.setattr(CacheCare, "batch_done", lambda *_: looked.append(1) or [])
    recorded = RecordedCalls(module.layer)
    for expected in (0, 4):
        fit(module, DataLoader([torch.ones(8, 64)] * 4, batch_size=None), strategy=UnifiedStrategy(), max_epochs=1)
        assert len(looked) == expected
        recorded.remove()


def test_a_budget_that_the_steps_need_leaves_nothing_spare(monkeypatch):
    strategy = run(Keeps(0))
    monkeypatch.setattr(strategy.first_step.budget, "foreign_bytes", GIB)

    assert strategy.spare_bytes == 0
