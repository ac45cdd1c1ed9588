"""A step repeated after running out of memory equals an undisturbed one, bit for bit.

The undisturbed run has the smaller size from the start.
"""

import gc
import weakref

import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import OutOfMemoryError, SplitError
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import MLP, RaggedTokens, fit, weights
from tests.support.runs.recovering import BATCH, TEXT, Fails, ShrinksAt, Stateful, run, undisturbed

PHASES = ("forward", "backward", "optimizer.step")


TURNS = [
    *((Stateful, phase, window) for phase, window in zip(PHASES, (1, 2, 3), strict=True)),
    *((RaggedTokens, phase, window) for phase, window in zip(PHASES, (3, 1, 2), strict=True)),
]


@first_cells(2, ("kind", "phase", "window"), crossed([Stateful, RaggedTokens], PHASES, [1, 2, 3], fast=TURNS))
def test_a_recovered_run_equals_the_undisturbed_one_with_that_size(kind, phase, window):
    failing = Fails(phase, batch=5 if phase == "optimizer.step" and window > 1 else BATCH)
    module, seen, trainer = run(kind, failing, window=window, clip=0.3)
    limit = trainer.strategy.micro_batch_size
    twin, twin_seen, _ = undisturbed(kind, limit, failing.batch, window=window, clip=0.3)

    assert failing.raised == 1
    assert trainer.strategy.recoveries == 1
    assert limit < 8
    assert torch.equal(weights(module), weights(twin))
    for mine, other in zip(module.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert seen.callback_metrics == twin_seen.callback_metrics
    assert (len(seen.gradients), len(seen.outputs)) == (len(twin_seen.gradients), len(twin_seen.outputs))
    assert torch.equal(seen.gradients[-1], twin_seen.gradients[-1])


def test_running_out_of_memory_in_the_first_optimizer_step_leaves_no_trace():
    module, _, trainer = run(MLP, Fails("optimizer.step", batch=0))
    twin, _, _ = run(MLP, ShrinksAt(4, 0))

    assert trainer.strategy.recoveries == 1
    assert torch.equal(weights(module), weights(twin))


def test_a_batch_is_halved_until_it_fits():
    class Large(MLP):
        def training_step(self, batch, batch_idx):
            if len(batch["x"]) > 2:
                raise RuntimeError(TEXT)
            return super().training_step(batch, batch_idx)

    _, seen, trainer = run(Large)
    _, plain, _ = run(MLP)

    assert trainer.strategy.micro_batch_size == 2
    assert trainer.strategy.effective_batch_size == 8
    torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(plain.gradients), rtol=1e-12, atol=1e-14)


def test_one_row_that_does_not_fit_is_one_clear_error():
    class TooLarge(MLP):
        def training_step(self, batch, batch_idx):
            raise RuntimeError(TEXT)

    with pytest.raises(OutOfMemoryError, match=r"activations of 1 row do not fit") as caught:
        run(TooLarge)
    text = str(caught.value)

    assert "weights" in text and "gradients" in text and "optimizer state" in text
    assert "memory.recompute=true" in text


def test_other_errors_come_through_untouched():
    class Broken(MLP):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("the size of tensor a (3) must match the size of tensor b (4)")

    with pytest.raises(RuntimeError, match=r"^the size of tensor a \(3\)") as caught:
        run(Broken)

    assert type(caught.value) is RuntimeError


def test_recovery_can_be_switched_off():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        run(MLP, Fails("forward"), recover=False)


def test_batch_norm_refuses_a_split_unless_it_is_accepted():
    torch.manual_seed(0)
    module = Stateful().double()

    with pytest.raises(SplitError, match=r'BatchNorm in train mode \(net\.1.*batch_norm="micro"'):
        fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=4))


def test_batch_norm_trains_undivided():
    torch.manual_seed(0)
    module = Stateful().double()
    fit(module, module.loader(), strategy="unified")

    assert int(module.net[1].num_batches_tracked) == 6


def test_a_module_whose_rules_say_it_cannot_be_split_is_not():
    torch.manual_seed(0)
    module = MLP().double()
    rules = MicroBatchRules(splittable=False)

    with pytest.raises(SplitError, match="rules of MLP say splittable=False and its batch of 8 rows"):
        fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=4, micro_batches=rules))


def test_the_failed_attempts_tensors_are_gone_before_the_step_is_repeated():
    alive = []
    note = alive.append  # a list that the step names would be put back

    class Watched(MLP):
        def training_step(self, batch, batch_idx):
            gc_free = [ref() is not None for ref in note.__self__]
            hidden = self.net[0](batch["x"])
            if len(batch["x"]) > 4:
                note(weakref.ref(hidden))
                raise RuntimeError(TEXT)
            assert not any(gc_free), "the failed attempt's activations are still held"
            return super().training_step(batch, batch_idx)

    gc.disable()
    try:
        run(Watched)
    finally:
        gc.enable()

    assert alive


def test_prepare_runs_once_even_if_the_step_is_repeated():
    class Prepares(MLP):
        prepared = 0

        def configure_micro_batches(self, stage):
            return MicroBatchRules(prepare=self.with_noise)

        def with_noise(self, batch):
            self.prepared += 1
            return {**batch, "noise": torch.randn(len(batch["x"]), 6, dtype=torch.float64)}

        def training_step(self, batch, batch_idx):
            batch["x"] = batch["x"] + batch["noise"]
            return super().training_step(batch, batch_idx)

    module, _, _ = run(Prepares, Fails("backward"))

    assert module.prepared == 6


def test_units_are_not_split():
    class Pairs(MLP):
        sizes = set()

        def configure_micro_batches(self, stage):
            return MicroBatchRules(unit=4)

        def training_step(self, batch, batch_idx):
            self.sizes.add(len(batch["x"]))
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = Pairs().double()
    fit(module, module.loader(rows=16), strategy=UnifiedStrategy(micro_batch_size=6, check_split=False))

    assert module.sizes == {4}


def test_a_batch_that_is_no_multiple_of_the_unit_is_refused():
    torch.manual_seed(0)
    module = MLP().double()
    strategy = UnifiedStrategy(micro_batch_size=6, micro_batches=MicroBatchRules(unit=3))

    with pytest.raises(SplitError, match="8 rows cannot be split into units of 3"):
        fit(module, module.loader(), strategy=strategy)
