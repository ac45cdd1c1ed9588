"""The free disk is compared with the checkpoints of a run before the first step."""

from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.callbacks.checkpoint import disk
from lightning_unified.callbacks.checkpoint.disk import checkpoint_bytes, free_bytes, shortage
from lightning_unified.errors import ConfigurationError

GIB = 2**30


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Return a function that trains one step on a disk with so many free bytes."""

    def train(free, **options):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
        callback = RunCheckpoint(tmp_path / "new" / "checkpoints", every_n_steps=1, **options)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        L.Trainer(max_steps=1, accelerator="cpu", callbacks=[callback], **quiet).fit(BoringModel())
        return callback

    return train


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_training(fit, tmp_path):
    with pytest.raises(ConfigurationError, match=r"has 100 B free, and one checkpoint takes 264 B .*another disk"):
        fit(100)

    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_disk_without_room_for_all_checkpoints_is_warned_about(fit):
    with pytest.warns(UserWarning, match=r"up to 5 checkpoints of 264 B take 1\.29 KiB"):
        assert fit(1000).last_model_path


def test_room_for_all_is_not_mentioned(tmp_path):
    assert shortage(GIB, free=5 * GIB, keep=3, folder=tmp_path) is None
    assert shortage(GIB, free=4 * GIB, keep=3, folder=tmp_path) is not None


def test_a_checkpoint_holds_weights_and_optimizer_state():
    module = BoringModel()
    state_of = lambda optimizer: SimpleNamespace(optimizers=[optimizer])  # noqa: E731

    assert checkpoint_bytes(state_of(torch.optim.SGD(module.parameters(), 0.1)), module) == 264
    assert 3 * 264 <= checkpoint_bytes(state_of(torch.optim.AdamW(module.parameters())), module) < 3 * 264 + 64


def test_frozen_weights_that_a_module_may_leave_out_are_not_counted():
    class Adapted(BoringModel):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["layer.weight"]

    module = Adapted()
    module.layer.weight.requires_grad_(False)

    assert checkpoint_bytes(SimpleNamespace(optimizers=[]), module) == 2 * 4


def test_the_disk_of_a_folder_that_is_not_there_yet_is_known(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.1)
    assert free_bytes(Path("relative/not/yet")) is not None
