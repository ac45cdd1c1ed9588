"""Losses of several summands in training: recovery, a scaler, compiled blocks, two ranks."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lasting import Lasting
from tests.support.modules.plain import weights
from tests.support.modules.summed import Pretraining, Summed, Switched, loader
from tests.support.ranks.processes import on_ranks
from tests.support.ranks.runs import trainer_of
from tests.support.runs.scaled import live
from tests.support.runs.split_and_whole import EXACT, run

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Fails(L.Callback):
    """Runs out of memory in the second micro-batch's backward pass of one step."""

    left = Lasting(2)

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 3 and self.left:
            self.left -= 1
            if not self.left:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)


@pytest.mark.parametrize("kind", [Pretraining, Switched])
def test_a_step_that_runs_out_of_memory_is_repeated_exactly(kind):
    whole, plain, _ = run(kind, "auto", lambda: loader(sparse=True))
    split, seen, trainer = run(
        kind, UnifiedStrategy(micro_batch_size=6), lambda: loader(sparse=True), callbacks=lambda: [Fails()]
    )

    assert trainer.strategy.policy.recoveries == 1
    torch.testing.assert_close(weights(split), weights(whole), **EXACT)
    for mine, theirs in zip(seen.callback_metrics, plain.callback_metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def trained(*, epochs, strategy, resumed=None, kind=Pretraining, **options):
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = kind() if "plugins" in options else kind().double()
    dtype = torch.float32 if "plugins" in options else torch.float64
    trainer.fit(module, loader(dtype=dtype), ckpt_path=resumed, weights_only=False)
    return module, trainer


def test_a_resumed_run_goes_on_with_the_summands_weights(tmp_path):
    _, trainer = trained(epochs=1, strategy=UnifiedStrategy(micro_batch_size=3))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = trainer.strategy.policy.splits.loss_rule
    split, resumed = trained(epochs=2, strategy=UnifiedStrategy(micro_batch_size=3), resumed=tmp_path / "one.ckpt")
    whole, _ = trained(epochs=2, strategy="auto")

    assert resumed.strategy.policy.splits.loss_rule == found
    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


def test_a_gradient_scaler_sees_gradients_of_the_whole_batch():
    split, _ = trained(epochs=2, strategy=UnifiedStrategy(micro_batch_size=3), plugins=[live()])
    whole, _ = trained(epochs=2, strategy="auto", plugins=[live()])

    torch.testing.assert_close(weights(split), weights(whole), rtol=5e-3, atol=5e-4)


class Compiled(Pretraining):
    """Has a compiled trunk and a compiled head."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(self.trunk)
        self.trunk.compile(backend="aot_eager")
        self.rows = torch.compile(self.rows, backend="aot_eager")


def test_compiled_blocks_leave_the_summands_weights_exact():
    whole, *_ = run(Compiled, "auto")
    split, *_ = run(Compiled, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


class OneGraph(Summed):
    """Computes its loss in one compiled graph, where no summands are seen."""

    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.of_inputs, backend="aot_eager")

    def of_inputs(self, inputs, batch):
        return self.loss(self.trunk(inputs).tanh(), batch)

    def training_step(self, batch, batch_idx):
        return self.compiled(batch["x"], copy.copy(batch))


def test_a_loss_in_one_compiled_graph_is_refused():
    with pytest.raises(SplitError, match="adds up other summands in micro-batch 0"):
        run(OneGraph, UnifiedStrategy(micro_batch_size=3))


def on_a_rank(is_split):
    torch.manual_seed(0)
    module = Pretraining().double()
    trainer = trainer_of(UnifiedDDPStrategy(micro_batch_size=3) if is_split else "ddp", max_epochs=2)
    trainer.fit(module, loader(rows=64))
    return weights(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_two_ranks_train_as_under_plain_ddp():
    for (split, logs), (whole, plain) in zip(on_ranks(on_a_rank, True), on_ranks(on_a_rank, False), strict=True):
        torch.testing.assert_close(split, whole, **EXACT)
        assert logs == pytest.approx(plain, rel=1e-6)
