"""A run that was stopped and resumed ends with the bits of one that was not."""

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified.callbacks import GracefulInterrupt, RunCheckpoint
from tests.support.lanes import crossed, first_cells

pytestmark = pytest.mark.filterwarnings("ignore")

VALIDATE_EVERY_2 = {"val_check_interval": 2, "check_val_every_n_epoch": None}
VALIDATE_EVERY_3 = {"val_check_interval": 3, "check_val_every_n_epoch": None}
VALIDATE_NEVER = {"limit_val_batches": 0}
BY_EPOCHS = {"max_steps": -1, "max_epochs": 3}


def stopped_and_resumed(small_run, folder, *, batches, **options):
    callbacks = [small_run.StopAfterBatch(batches), RunCheckpoint(folder)]
    small_run.fit(folder, callbacks=callbacks, **options)
    return small_run.fit(folder, callbacks=[RunCheckpoint(folder)], seed=99, resume=folder / "last.ckpt", **options)


@first_cells(
    1,
    ("options", "batches"),
    crossed(
        [{}, VALIDATE_EVERY_2, VALIDATE_NEVER, BY_EPOCHS],
        [1, 4, 5, 6, 7, 10],
        fast=[
            ({}, 4),
            ({}, 5),
            ({}, 6),
            (VALIDATE_EVERY_2, 1),
            (VALIDATE_EVERY_2, 10),
            (VALIDATE_NEVER, 5),
            (BY_EPOCHS, 5),
            (BY_EPOCHS, 7),
        ],
    ),
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_weights(small_run, tmp_path, batches, options):
    straight, straight_trainer = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    resumed, trainer = stopped_and_resumed(small_run, tmp_path / "b", batches=batches, **options)

    assert trainer.global_step == straight_trainer.global_step
    assert small_run.same_weights(straight, resumed)


@first_cells(
    1,
    ("options", "first", "second"),
    crossed(
        [{}, VALIDATE_EVERY_2, VALIDATE_NEVER],
        [4, 5, 6],
        [1, 2, 4, 5, 6],
        fast=[
            ({}, 4, 1),
            ({}, 5, 5),
            ({}, 6, 4),
            (VALIDATE_EVERY_2, 5, 1),
            (VALIDATE_EVERY_2, 6, 6),
            (VALIDATE_NEVER, 4, 2),
            (VALIDATE_NEVER, 5, 5),
        ],
    ),
    ids=str,
)
def test_a_run_stopped_twice_ends_with_the_same_weights(small_run, tmp_path, options, first, second):
    """The first stop may be at an epoch's last batch, the fifth.

    The second stop counts from there.
    """
    options = {**BY_EPOCHS, **options}
    straight, straight_trainer = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    last = tmp_path / "b/last.ckpt"
    for batches, resume in ((first, None), (second, last)):
        callbacks = [small_run.StopAfterBatch(batches), RunCheckpoint(tmp_path / "b")]
        small_run.fit(tmp_path, callbacks=callbacks, seed=1 if resume is None else 99, resume=resume, **options)
    callbacks = [RunCheckpoint(tmp_path / "b")]
    resumed, trainer = small_run.fit(tmp_path, callbacks=callbacks, seed=99, resume=last, **options)

    assert (trainer.global_step, trainer.current_epoch) == (
        straight_trainer.global_step,
        straight_trainer.current_epoch,
    )
    assert small_run.same_weights(straight, resumed)


def test_an_epoch_after_a_resume_begins_as_any_other(small_run, tmp_path):
    class Begun(Callback):
        def __init__(self):
            self.epochs = []

        def on_train_epoch_start(self, trainer, *_):
            self.epochs.append(trainer.current_epoch)

    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(5), RunCheckpoint(tmp_path)], **BY_EPOCHS)
    begun = Begun()
    small_run.fit(tmp_path, callbacks=[begun, RunCheckpoint(tmp_path)], resume=tmp_path / "last.ckpt", **BY_EPOCHS)

    assert begun.epochs == [1, 2]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_run_in_another_precision_than_its_modules_resumes_with_every_bit(small_run, tmp_path, precision):
    """Lightning loads a checkpoint before it converts the module.

    So float64 weights would go through float32.
    """
    plugin = {"precision": precision, "max_steps": 6, "limit_val_batches": 0}
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **plugin)
    callbacks = [small_run.StopAfterBatch(3), RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, **plugin)
    last = tmp_path / "b/last.ckpt"
    callbacks = [RunCheckpoint(tmp_path / "b")]
    resumed, _ = small_run.fit(tmp_path, callbacks=callbacks, seed=99, resume=last, **plugin)

    assert small_run.same_weights(straight, resumed)


@first_cells(
    1,
    ("options", "batches"),
    crossed(
        [{}, VALIDATE_EVERY_3, BY_EPOCHS],
        [1, 5, 7, 9, 10, 12],
        fast=[({}, 1), ({}, 9), (VALIDATE_EVERY_3, 5), (VALIDATE_EVERY_3, 7), (BY_EPOCHS, 5), (BY_EPOCHS, 12)],
    ),
    ids=str,
)
def test_a_run_stopped_inside_an_accumulation_window_goes_on_with_its_gradients(small_run, tmp_path, batches, options):
    options = {"max_steps": 9, "accumulate_grad_batches": 2, **options}
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    resumed, _ = stopped_and_resumed(small_run, tmp_path / "b", batches=batches, **options)

    assert small_run.same_weights(straight, resumed)


@first_cells(
    1,
    ("options", "accumulate"),
    crossed([{}, VALIDATE_EVERY_2], [1, 2], fast=[({}, 2), (VALIDATE_EVERY_2, 1)]),
    ids=str,
)
def test_every_step_file_leads_to_the_same_weights(small_run, tmp_path, accumulate, options):
    options = {"max_steps": 9, "accumulate_grad_batches": accumulate, **options}
    every = RunCheckpoint(tmp_path / "a", every_n_steps=1, keep=100)
    straight, _ = small_run.fit(tmp_path, callbacks=[every], **options)
    files = sorted((tmp_path / "a").glob("step_*.ckpt"))

    assert [int(file.stem[5:]) for file in files] == list(range(1, 10))
    for file in files[:-1]:
        callbacks = [RunCheckpoint(tmp_path / "b")]
        resumed, _ = small_run.fit(tmp_path, callbacks=callbacks, seed=99, resume=file, **options)
        assert small_run.same_weights(straight, resumed), file.name


def test_a_finished_run_can_be_made_longer(small_run, tmp_path):
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], max_steps=13)
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], max_steps=7)
    last = tmp_path / "b/last.ckpt"
    longer, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=last, max_steps=13)

    assert small_run.same_weights(straight, longer)


def test_without_the_random_states_the_resumed_run_differs(small_run, tmp_path):
    """The twin of the tests above: dropout does notice what they say is restored."""
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")])
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(7), RunCheckpoint(tmp_path / "b")])
    file = tmp_path / "b/last.ckpt"
    checkpoint = torch.load(file)
    del checkpoint["lightning_unified.continuation"]
    torch.save(checkpoint, file)
    with pytest.warns(UserWarning, match="holds no random states"):
        resumed, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=file)

    assert not small_run.same_weights(straight, resumed)


def test_a_plain_shuffling_loader_goes_on_at_the_epochs_end(small_run, tmp_path):
    def loader():
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.randn(20, 6, generator=generator), torch.randn(20, 1, generator=generator))
        return DataLoader(data, batch_size=4, shuffle=True)

    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], loader=loader())
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(5), RunCheckpoint(tmp_path / "b")], loader=loader())
    resumed, _ = small_run.fit(
        tmp_path,
        callbacks=[RunCheckpoint(tmp_path / "b")],
        seed=99,
        resume=tmp_path / "b/last.ckpt",
        loader=loader(),
    )

    assert small_run.same_weights(straight, resumed)


@first_cells(1, "shuffle", [False, True])
@first_cells(
    3,
    "validations",
    [{}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 2}, {"val_check_interval": 0.4}, VALIDATE_EVERY_2],
    ids=str,
)
def test_a_file_of_an_epochs_last_batch_leads_to_the_same_weights(small_run, tmp_path, validations, shuffle):
    def fit(folder, **options):
        rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(7))
        loader = DataLoader(TensorDataset(rows, rows[:, :1]), batch_size=4, shuffle=shuffle)
        own = RunCheckpoint(tmp_path / folder, every_n_steps=5)
        return small_run.fit(tmp_path, callbacks=[own], loader=loader, **validations, **options)[0]

    straight, last = fit("a"), tmp_path / "a/step_000005.ckpt"

    assert torch.load(last)["lightning_unified.continuation"]["epoch_is_over"]
    assert small_run.same_weights(straight, fit("b", seed=99, resume=last))


def test_python_and_numpy_random_streams_go_on(small_run, tmp_path):
    import random

    import numpy as np

    class Draws(Callback):
        def __init__(self):
            self.seen = []

        def on_before_zero_grad(self, *_):
            self.seen.append((random.random(), float(np.random.rand())))

    straight = Draws()
    small_run.fit(tmp_path, callbacks=[straight, RunCheckpoint(tmp_path / "a")], max_steps=6)
    random.seed(0)
    np.random.seed(0)
    first = Draws()
    small_run.fit(tmp_path, callbacks=[first, small_run.StopAfterBatch(3), RunCheckpoint(tmp_path / "b")], max_steps=6)
    random.seed(5)
    np.random.seed(5)
    second = Draws()
    last = tmp_path / "b/last.ckpt"
    small_run.fit(tmp_path, callbacks=[second, RunCheckpoint(tmp_path / "b")], resume=last, max_steps=6)

    assert len(first.seen) == len(second.seen) == 3
    random.seed(0)
    np.random.seed(0)
    expected = [(random.random(), float(np.random.rand())) for _ in range(6)]
    assert [*first.seen, *second.seen] == expected


def test_validation_does_not_move_the_random_stream_of_training(small_run, tmp_path):
    often, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **VALIDATE_EVERY_2)
    never, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], **VALIDATE_NEVER)

    assert small_run.same_weights(often, never)


def test_a_random_state_of_another_world_size_is_not_restored_and_that_is_said(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(3), RunCheckpoint(tmp_path)])
    file = tmp_path / "last.ckpt"
    checkpoint = torch.load(file)
    noted = checkpoint["lightning_unified.continuation"]
    noted["random"] = noted["random"] * 2
    torch.save(checkpoint, file)
    with pytest.warns(UserWarning, match="random states of 2 processes and this run has 1"):
        small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path)], resume=file)


def test_a_validation_from_a_checkpoint_leaves_nothing_for_the_next_fit(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(3), RunCheckpoint(tmp_path / "a")])
    shutil.copy(tmp_path / "a/last.ckpt", tmp_path / "other.ckpt")
    fresh, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], max_steps=4)

    module, trainer = small_run.build(tmp_path, callbacks=[RunCheckpoint(tmp_path / "c")], max_steps=4)
    trainer.validate(module, small_run.validation_loader(), ckpt_path=tmp_path / "other.ckpt", verbose=False)
    torch.manual_seed(3)
    module = small_run.SmallModule()
    torch.manual_seed(1)
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())

    assert small_run.same_weights(fresh, module)


def test_the_best_value_and_the_kept_files_survive_a_resume(small_run, tmp_path):
    def checkpoint():
        return RunCheckpoint(tmp_path, every_n_steps=2, keep=2)

    first = checkpoint()
    small_run.fit(tmp_path, callbacks=[first], max_steps=7, **VALIDATE_EVERY_2)
    second = checkpoint()
    options = {"max_steps": 7, **VALIDATE_EVERY_2}
    small_run.fit(tmp_path, callbacks=[second], resume=tmp_path / "last.ckpt", **options)

    assert second.best_model_score == first.best_model_score is not None
    assert second.state_dict()["kept"] == first.state_dict()["kept"] == ["step_000004.ckpt", "step_000006.ckpt"]


def test_another_monitor_forgets_the_old_ones_best(small_run, tmp_path):
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path)], max_steps=5)
    other = RunCheckpoint(tmp_path, monitor="train/loss")
    other.load_state_dict(torch.load(tmp_path / "last.ckpt")["callbacks"]["RunCheckpoint"])

    assert other.best_model_score is None


def test_a_stop_by_signal_and_a_stop_by_flag_write_the_same_state(small_run, tmp_path):
    import os
    import signal

    def kill(trainer):
        os.kill(os.getpid(), signal.SIGTERM)

    by_signal = [small_run.StopAfterBatch(7, act=kill), GracefulInterrupt(), RunCheckpoint(tmp_path / "a")]
    small_run.fit(tmp_path, callbacks=by_signal)
    small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(7), RunCheckpoint(tmp_path / "b")])
    a, b = (torch.load(tmp_path / name / "last.ckpt")["state_dict"] for name in "ab")

    assert all(torch.equal(a[name], b[name]) for name in a)


def logged_losses():
    from lightning.pytorch.loggers.logger import DummyLogger

    logger = DummyLogger()
    logger.losses = []
    logger.log_metrics = lambda metrics, step=None: (
        logger.losses.append((step, metrics["train/loss"])) if "train/loss" in metrics else None
    )
    return logger


@first_cells(
    1,
    ("options", "accumulate", "batches"),
    crossed(
        [VALIDATE_EVERY_2, VALIDATE_NEVER],
        [1, 2],
        [4, 5, 6],
        fast=[(VALIDATE_EVERY_2, 1, 5), (VALIDATE_EVERY_2, 2, 4), (VALIDATE_NEVER, 1, 6), (VALIDATE_NEVER, 2, 5)],
    ),
    ids=str,
)
def test_the_logs_of_a_resumed_run_go_on_where_they_were(small_run, tmp_path, batches, accumulate, options):
    options = {"log_every_n_steps": 1, "accumulate_grad_batches": accumulate, "max_steps": 9, **options}
    whole, first, second = logged_losses(), logged_losses(), logged_losses()
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], logger=whole, **options)
    callbacks = [small_run.StopAfterBatch(batches), RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, logger=first, **options)
    last = tmp_path / "b/last.ckpt"
    callbacks = [RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, logger=second, resume=last, seed=99, **options)

    assert [*first.losses, *second.losses] == whole.losses


def test_the_logs_go_on_from_a_validation_that_the_longer_run_does_not_have(small_run, tmp_path):
    options = {"log_every_n_steps": 1, "check_val_every_n_epoch": None}
    whole, first, second = logged_losses(), logged_losses(), logged_losses()
    callbacks = [RunCheckpoint(tmp_path / "a")]
    small_run.fit(tmp_path, callbacks=callbacks, logger=whole, max_steps=9, val_check_interval=9, **options)
    callbacks = [RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, logger=first, max_steps=4, val_check_interval=4, **options)
    last = tmp_path / "b/last.ckpt"
    options |= {"max_steps": 9, "val_check_interval": 9}
    small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], logger=second, resume=last, **options)

    assert [*first.losses, *second.losses] == whole.losses
