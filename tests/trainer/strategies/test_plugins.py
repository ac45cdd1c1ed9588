"""A user's plugins beside a strategy object: checkpoint writers and precision.

Both kinds of strategy are covered.
"""

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchCheckpointIO

from lightning_unified import AtomicCheckpointIO, RunCheckpoint, UnifiedDDPStrategy, UnifiedStrategy
from lightning_unified.errors import CheckpointError
from lightning_unified.files.mapped import is_mapped

KINDS = pytest.mark.parametrize("kind", [UnifiedStrategy, UnifiedDDPStrategy])


def trainer_of(tmp_path=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    defaults = {"devices": 1, "max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
    return L.Trainer(default_root_dir=tmp_path, **{**quiet, **defaults, **options})


class Adam(BoringModel):
    """Has optimizer state, and notes which tensors lie in the checkpoint's file."""

    assigns = False

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.given = [is_mapped(one) for one in state_dict.values()]
        return super().load_state_dict(state_dict, strict, assign=self.assigns)

    def on_train_start(self):
        states = [one for state in self.optimizers().optimizer.state.values() for one in state.values()]
        self.mapped = [is_mapped(one.data) for one in (*self.parameters(), *states)]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


@pytest.mark.parametrize("assigns", [False, True])
def test_a_resumed_run_holds_no_tensor_in_the_checkpoints_file(tmp_path, assigns):
    first, resumed = Adam(), Adam()
    resumed.assigns = assigns
    trainer = trainer_of(tmp_path, strategy=UnifiedStrategy(), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer_of(tmp_path, strategy=UnifiedStrategy(), max_epochs=2).fit(resumed, ckpt_path=tmp_path / "a.ckpt")

    assert all(resumed.given)
    assert len(resumed.mapped) == 8  # two parameters, and three entries of state for each
    assert not any(resumed.mapped)


class Noting(CheckpointIO):
    """Notes what Lightning hands over, each argument by the name that it came with."""

    def __init__(self) -> None:
        self.saved, self.loaded, self.files = [], [], {}

    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.saved.append((str(path), storage_options))
        self.files[str(path)] = checkpoint

    def load_checkpoint(self, path, *, map_location=None, weights_only=None):
        self.loaded.append((str(path), map_location, weights_only))
        return self.files[str(path)]

    def remove_checkpoint(self, path):
        del self.files[str(path)]


class KeywordOnly(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


class AtomicAndKeywordOnly(AtomicCheckpointIO, KeywordOnly):
    """Hands on to a writer that takes storage options by name only, as Lightning gives them."""


@KINDS
def test_without_a_plugin_checkpoints_are_written_atomically(kind):
    assert isinstance(trainer_of(strategy=kind()).strategy.checkpoint_io, AtomicCheckpointIO)
    assert isinstance(trainer_of(strategy=kind.strategy_name).strategy.checkpoint_io, AtomicCheckpointIO)


@KINDS
def test_a_checkpoint_plugin_replaces_the_strategys_own(kind):
    io = Noting()

    assert trainer_of(strategy=kind(), plugins=[io]).strategy.checkpoint_io is io


@KINDS
def test_a_wrapping_plugin_without_an_inner_one_wraps_the_atomic_one(kind):
    strategy = trainer_of(strategy=kind(), plugins=[AsyncCheckpointIO()]).strategy

    assert isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
    assert isinstance(strategy.checkpoint_io.checkpoint_io, AtomicCheckpointIO)


def test_a_wrapping_plugin_keeps_the_inner_one_it_was_given():
    io = Noting()
    for wrapper in (AsyncCheckpointIO(io), AsyncCheckpointIO(AsyncCheckpointIO(io))):
        strategy = trainer_of(strategy=UnifiedStrategy(), plugins=[wrapper]).strategy

        assert strategy.checkpoint_io is wrapper
        inner = wrapper.checkpoint_io
        assert (inner if isinstance(inner, Noting) else inner.checkpoint_io) is io


@pytest.mark.parametrize("ours", [True, False])
def test_a_run_saves_asynchronously_and_goes_on_from_the_file(tmp_path, ours):
    def run(folder, **options):
        torch.manual_seed(0)
        module = BoringModel()
        callback = (
            RunCheckpoint(folder, every_n_steps=1, monitor=None) if ours else ModelCheckpoint(folder, save_last=True)
        )
        trainer = trainer_of(
            folder, strategy=UnifiedStrategy(), plugins=[AsyncCheckpointIO()], callbacks=[callback], max_epochs=2
        )
        trainer.fit(module, **options)
        assert trainer.strategy.checkpoint_io._executor is None  # its thread has ended
        return trainer, module

    trainer, module = run(tmp_path)
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)
    resumed, again = run(tmp_path / "again", ckpt_path=tmp_path / "last.ckpt")

    assert state["global_step"] == trainer.global_step == resumed.global_step == 8
    for name, weight in module.state_dict().items():
        assert torch.equal(state["state_dict"][name], weight) and torch.equal(again.state_dict()[name], weight)
    trainer.validate(module, ckpt_path=tmp_path / "last.ckpt", verbose=False)


def test_a_failure_of_an_asynchronous_write_ends_the_run_with_its_reason(tmp_path):
    class Fails(TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            raise OSError("the bucket is gone")

    trainer = trainer_of(
        tmp_path,
        strategy=UnifiedStrategy(),
        plugins=[AsyncCheckpointIO(Fails())],
        callbacks=[RunCheckpoint(tmp_path, monitor=None)],
    )
    with pytest.raises((CheckpointError, OSError), match="the bucket is gone"):
        trainer.fit(BoringModel())


@KINDS
def test_storage_options_reach_a_users_plugin_by_name(tmp_path, kind):
    io = Noting()
    trainer = trainer_of(strategy=kind(), plugins=[io], enable_checkpointing=False)
    trainer.strategy.connect(BoringModel())
    trainer.strategy.save_checkpoint({"n": 1}, "a.ckpt", {"acl": "private"})
    trainer.strategy.save_checkpoint({"n": 2}, "b.ckpt", storage_options={"acl": "public"})

    assert io.saved == [("a.ckpt", {"acl": "private"}), ("b.ckpt", {"acl": "public"})]
    assert trainer.strategy.load_checkpoint("b.ckpt", False)["n"] == 2
    assert trainer.strategy.load_checkpoint("a.ckpt", weights_only=True)["n"] == 1
    assert [weights_only for _, _, weights_only in io.loaded] == [False, True]


@pytest.mark.parametrize("io", [AtomicCheckpointIO(), TorchCheckpointIO(), AtomicAndKeywordOnly()])
def test_storage_options_are_refused_where_a_file_has_none(tmp_path, io):
    with pytest.raises(TypeError, match=f"not supported for `{type(io).__name__}`"):
        io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt", storage_options={"acl": "private"})
    with pytest.raises(TypeError):
        io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt", {"acl": "private"})

    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_written_and_read_by_position_and_by_name(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt", None)
    io.save_checkpoint(checkpoint={"n": 2}, path=tmp_path / "b.ckpt", storage_options=None)

    assert io.load_checkpoint(tmp_path / "a.ckpt", None, True) == {"n": 1}
    assert io.load_checkpoint(path=tmp_path / "b.ckpt", map_location="cpu", weights_only=False) == {"n": 2}


class Counts(MixedPrecision):
    """A user's own precision plugin."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.seen = {"pre_backward": 0, "backward": 0, "post_backward": 0, "optimizer_step": 0}

    def pre_backward(self, *args, **kwargs):
        self.seen["pre_backward"] += 1
        return super().pre_backward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.seen["backward"] += 1
        return super().backward(*args, **kwargs)

    def post_backward(self, *args, **kwargs):
        self.seen["post_backward"] += 1
        return super().post_backward(*args, **kwargs)

    def optimizer_step(self, *args, **kwargs):
        self.seen["optimizer_step"] += 1
        return super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize("strategy", ["auto", UnifiedStrategy])
def test_a_users_precision_plugin_runs_each_micro_batch(strategy):
    plugin = Counts()
    trainer = trainer_of(
        strategy=strategy if strategy == "auto" else strategy(), plugins=[plugin], enable_checkpointing=False
    )
    trainer.fit(BoringModel())

    assert trainer.precision_plugin is plugin
    assert plugin.seen == {"pre_backward": 4, "backward": 4, "post_backward": 4, "optimizer_step": 4}
