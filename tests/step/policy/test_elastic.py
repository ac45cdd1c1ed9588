"""Sizes are found once: a repeated run starts with them, a resumed run continues.

Sizes reduced by pressure grow again.
"""

import json

import lightning as L
import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.errors import OutOfMemoryError
from tests.support.lasting import Lasting
from tests.support.modules.plain import MLP, weights

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Holds(MLP):
    """Fits `most` rows at once."""

    most = 3

    def training_step(self, batch, batch_idx):
        if len(batch["x"]) > self.most:
            raise torch.OutOfMemoryError(TEXT)
        return super().training_step(batch, batch_idx)


def train(kind=Holds, *callbacks, ckpt_path=None, epochs=2, **strategy):
    torch.manual_seed(0)
    module = kind().double()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(**strategy),
        precision="64-true",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, module.loader(), ckpt_path=ckpt_path)
    return module, trainer.strategy


def test_a_repeated_run_starts_with_the_sizes_that_the_run_beside_it_found(tmp_path):
    _, first = train(remember=str(tmp_path / "one" / "sizes.json"))
    _, second = train(remember=str(tmp_path / "two" / "sizes.json"))

    assert first.recoveries == 2
    assert second.recoveries == 0
    assert second.micro_batch_size == first.micro_batch_size == 2


@pytest.mark.slow
def test_sizes_of_another_module_are_left_alone(tmp_path):
    class Wider(Holds):
        most = 99

    train(remember=str(tmp_path / "one" / "sizes.json"))
    _, other = train(Wider, remember=str(tmp_path / "two" / "sizes.json"))

    assert other.micro_batch_size == 8


def test_a_run_without_trouble_leaves_no_file(tmp_path):
    train(MLP, remember=str(tmp_path / "one" / "sizes.json"))

    assert list(tmp_path.rglob("*.json")) == []


def test_a_file_that_is_no_record_is_passed_over(tmp_path):
    path = tmp_path / "one" / "sizes.json"
    path.parent.mkdir()
    path.write_text('{"fingerprint":')
    _, strategy = train(remember=str(path))

    assert strategy.recoveries == 2
    assert json.loads(path.read_text())["training"]["failures"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    _, strategy = train(remember=str(tmp_path / "file" / "sizes.json"))

    assert strategy.recoveries == 2
    assert "Micro-batch sizes are not saved" in caplog.text


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_sizes_and_the_bits(tmp_path):
    """The resumed run has the memory for whole batches.

    It must not use another size than the run it continues.
    """

    class Freed(Holds):
        most = 99

    Freed.__name__ = "Holds"
    files = RunCheckpoint(tmp_path / "files", every_n_steps=1, keep=10, monitor=None)
    whole, first = train(Holds, files)
    module, second = train(
        Freed, RunCheckpoint(tmp_path / "again", monitor=None), ckpt_path=tmp_path / "files" / "step_000003.ckpt"
    )

    assert (first.recoveries, second.recoveries) == (2, 0)
    assert second.micro_batch_size == 2
    assert torch.equal(weights(module), weights(whole))


def test_what_pressure_took_comes_back_and_the_effective_batch_never_changed():
    sizes = []

    class Pressure(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            strategy, step = trainer.strategy, trainer.global_step
            sizes.append((strategy.micro_batch_size, strategy.effective_batch_size))
            if step in (1, 2):
                assert strategy.shrink("the machine is short of memory")
            if step in (3, 4):
                assert strategy.grow("the machine has memory again")

    _, strategy = train(MLP, Pressure())

    assert sizes == [(8, 8), (4, 8), (2, 8), (4, 8), (8, 8), (8, 8)]
    assert strategy.plan.reasons["micro_batch_size"].startswith("the whole batch, then larger again")
    assert not strategy.grow("nothing was taken")


def test_what_memory_refused_is_not_given_back_by_a_machine_at_ease():
    class Grows(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.strategy.grow("the machine has memory again")

    _, strategy = train(Holds, Grows())

    assert strategy.recoveries == 2
    assert strategy.micro_batch_size == 2


def test_more_memory_is_tried_again(monkeypatch):
    """After enough batches without trouble, and a quarter more room than when it ran out."""
    monkeypatch.setattr("lightning_unified.step.recovery.sizes._PATIENCE", 2)

    class Freed(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.most = 99
            trainer.strategy.policy.watch.room = lambda: 2**50

    _, strategy = train(Holds, Freed())

    assert strategy.micro_batch_size == 8
    assert any("more memory is available" in event for event in strategy.events)


class Prepares(MLP):
    """Runs out of memory in `prepare`, after it has drawn a number, as often as `times`."""

    times, noise = Lasting(1), ()

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=self.with_noise)

    def with_noise(self, batch):
        noise = torch.randn_like(batch["x"])
        if self.times and self.trainer.global_step == 1:
            self.times -= 1
            raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB.")
        return {**batch, "x": batch["x"] + noise}


def test_prepare_is_repeated_once_with_the_same_random_numbers():
    class Undisturbed(Prepares):
        times = 0

    module, strategy = train(Prepares)
    twin, _ = train(Undisturbed)

    assert strategy.recoveries == 1
    assert torch.equal(weights(module), weights(twin))


def test_prepare_that_does_not_fit_is_named():
    class Never(Prepares):
        times = 99

    with pytest.raises(
        OutOfMemoryError,
        match="the result of prepare on the whole batch does not fit: memory ran out in prepare even with cleared",
    ):
        train(Never)


@pytest.mark.parametrize(("what", "name"), [("transfer_batch_to_device", "the batch itself"), ("to", "the weights")])
def test_a_batch_that_cannot_be_split_is_tried_twice_and_then_named(what, name, monkeypatch):
    def refuse(self, *_args, **_kwargs):
        raise RuntimeError(
            "MPS backend out of memory (MPS allocated: 1.00 GB). Tried to allocate 4 bytes on shared pool."
        )

    monkeypatch.setattr(MLP, what, refuse, raising=False)
    with pytest.raises(OutOfMemoryError, match=name):
        train(MLP)


def test_logits_that_do_not_fit_are_named():
    class Vocabulary(MLP):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(16, 5000)

        def training_step(self, batch, batch_idx):
            asked = len(batch["x"]) * 5000 * 4
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {asked} bytes.")

    with pytest.raises(OutOfMemoryError, match="the logits of 1 row"):
        train(Vocabulary)


def test_a_first_optimizer_step_that_does_not_fit_names_the_state():
    class Refuses(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            raise RuntimeError(TEXT)

    class Module(MLP):
        def configure_optimizers(self):
            return Refuses(self.parameters())

    with pytest.raises(OutOfMemoryError, match="the optimizer's state, which its first step creates"):
        train(Module)
