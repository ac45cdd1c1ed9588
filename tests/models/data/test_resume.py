"""A resumed Lightning run sees the remaining batches in order, whenever it was saved."""

import warnings

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_unified.data import TextData
from tests.support.lanes import first_cells

EPOCHS = 3


class Reader(LightningModule):
    """Learns nothing; remembers what it was given."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
        self.fail_at = fail_at

    def training_step(self, batch):
        if self.fail_at == len(self.seen):
            raise RuntimeError("the step failed")
        self.seen.append(fingerprint(batch))
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    """Saves one checkpoint, in the hook and on the call of it that are named."""

    def __init__(self, hook, call, path):
        self.hook, self.left, self.path = hook, call, str(path)

    def _count(self, trainer, hook):
        if hook == self.hook and not trainer.sanity_checking:
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, *_):
        self._count(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer, *_):
        self._count(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer, *_):
        self._count(trainer, "on_train_epoch_end")

    def on_exception(self, trainer, *_):
        self._count(trainer, "on_exception")


def fingerprint(batch):
    return tuple(batch["input_ids"][:, 5].tolist())


def text_data(**changes):
    settings = {"source": "builtin", "batch_size": 2, "sequence_length": 192, "vocab_size": 300, "drop_last": False}
    return TextData(**(settings | changes))


def fit(model, data, *, ckpt_path=None, callbacks=(), **settings):
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return model.seen


def num_batches():
    return len(text_data().train_dataloader())


PLACES = {
    "mid-epoch of the first epoch": ("on_train_batch_end", 3, 3),
    "mid-epoch of the second epoch": ("on_train_batch_end", num_batches() + 2, num_batches() + 2),
    "after the last batch of an epoch, before the epoch's end": ("on_train_batch_end", num_batches(), num_batches()),
    "after validation at the end of an epoch": ("on_validation_end", 1, num_batches()),
    "at the end of an epoch": ("on_train_epoch_end", 2, 2 * num_batches()),
}


@first_cells(1, ("place", "num_workers"), [*((place, 0) for place in PLACES), ("mid-epoch of the second epoch", 2)])
def test_a_resumed_run_sees_the_batches_that_were_left(tmp_path, place, num_workers):
    hook, call, done = PLACES[place]
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    whole = fit(Reader(), text_data(**workers), callbacks=[Save(hook, call, tmp_path / "a.ckpt")])
    resumed = fit(Reader(), text_data(**workers), ckpt_path=tmp_path / "a.ckpt")

    assert len(whole) == EPOCHS * num_batches()
    assert resumed == whole[done:]


def test_a_batch_whose_step_failed_is_given_again(tmp_path):
    whole = fit(Reader(), text_data())
    with pytest.raises(RuntimeError, match="the step failed"):
        fit(Reader(fail_at=4), text_data(), callbacks=[Save("on_exception", 1, tmp_path / "a.ckpt")])
    resumed = fit(Reader(), text_data(), ckpt_path=tmp_path / "a.ckpt")

    assert resumed == whole[4:]


def test_validation_within_an_epoch_does_not_move_the_place(tmp_path):
    settings = {"val_check_interval": 2}
    whole = fit(Reader(), text_data(), callbacks=[Save("on_validation_end", 2, tmp_path / "a.ckpt")], **settings)
    resumed = fit(Reader(), text_data(), ckpt_path=tmp_path / "a.ckpt", **settings)

    assert resumed == whole[4:]


def test_a_limited_epoch_is_followed_by_a_new_one_when_resumed_at_its_end(tmp_path):
    settings = {"limit_train_batches": 3}
    whole = fit(Reader(), text_data(), callbacks=[Save("on_train_epoch_end", 1, tmp_path / "a.ckpt")], **settings)
    resumed = fit(Reader(), text_data(), ckpt_path=tmp_path / "a.ckpt", **settings)

    assert len(whole) == 3 * EPOCHS
    assert resumed == whole[3:]


def test_a_place_survives_being_resumed_twice(tmp_path):
    whole = fit(Reader(), text_data(), callbacks=[Save("on_train_batch_end", 2, tmp_path / "a.ckpt")])
    fit(
        Reader(),
        text_data(),
        ckpt_path=tmp_path / "a.ckpt",
        callbacks=[Save("on_train_batch_end", 2, tmp_path / "b.ckpt")],
    )
    resumed = fit(Reader(), text_data(), ckpt_path=tmp_path / "b.ckpt")

    assert resumed == whole[4:]


def test_lightnings_own_checkpoint_callback_saves_the_place(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole = fit(Reader(), text_data(), callbacks=[saver])
    resumed = fit(Reader(), text_data(), ckpt_path=tmp_path / "step=5.ckpt")

    assert resumed == whole[5:]


def test_epochs_have_different_orders_and_overfitting_always_the_same():
    count = num_batches()
    free = fit(Reader(), text_data())
    overfit = fit(Reader(), text_data(), overfit_batches=2)

    assert free[:count] != free[count : 2 * count]
    assert overfit == overfit[:2] * EPOCHS


def test_a_resume_in_mid_epoch_with_another_batch_size_is_refused(tmp_path):
    fit(Reader(), text_data(), callbacks=[Save("on_train_batch_end", 3, tmp_path / "a.ckpt")])

    with pytest.raises(ValueError, match=r"saved after batch 3 of epoch 0.*batch_size 2 -> 3"):
        fit(Reader(), text_data(batch_size=3), ckpt_path=tmp_path / "a.ckpt")


def test_a_resume_between_epochs_with_another_batch_size_is_accepted(tmp_path):
    fit(Reader(), text_data(), callbacks=[Save("on_train_epoch_end", 1, tmp_path / "a.ckpt")])
    loader = text_data(batch_size=3).train_dataloader()
    loader.load_state_dict(
        torch.load(tmp_path / "a.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    )

    assert len(next(iter(loader))["input_ids"]) == 3


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path):
    fit(Reader(), text_data(), callbacks=[Save("on_train_batch_end", 3, tmp_path / "a.ckpt")])

    with pytest.raises(ValueError, match="trained with another tokenizer"):
        fit(Reader(), text_data(vocab_size=310), ckpt_path=tmp_path / "a.ckpt")
