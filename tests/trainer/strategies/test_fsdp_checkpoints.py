"""Checkpoints of sharded ranks are whole or absent, and continued to the bit."""

import os
import pickle
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_unified import AtomicCheckpointIO, UnifiedFSDPStrategy
from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.files.atomic import put_back
from lightning_unified.models.plain_checkpoint import read_plain
from tests.support.lanes import crossed, slow, some
from tests.support.ranks import saved, sharded
from tests.support.ranks.processes import on_ranks


def load(path):
    return AtomicCheckpointIO().load_checkpoint(path)


def names(folder):
    return sorted(os.listdir(folder))


def assert_same(one, other):
    """Check that two checkpoints hold the same bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@cache
def alone():
    return sharded.trained("auto", ranks=1, rank=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with checkpoints of two ranks after an epoch."""
    folder = tmp_path_factory.mktemp("made")
    on_ranks(saved.stopped, 2, str(folder))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made / "last.ckpt", tmp_path / "last.ckpt"))


@pytest.mark.parametrize(
    ("hold", "distributed", "size"),
    crossed(["parameters", "shards"], [True, False], [2, 4], fast=[("parameters", True, 2)]),
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, hold, distributed, size):
    arguments = {**saved.HOLDS[hold], "save_distributed_checkpoint": distributed}
    for fits in on_ranks(saved.resumed, size, str(tmp_path), arguments, size=size):
        assert torch.equal(fits["resumed"]["weights"], fits["straight"]["weights"])
    assert (tmp_path / "stopped/last.ckpt").is_dir() == distributed


def test_each_rank_writes_its_own_rows(made):
    assert names(made) == ["last.ckpt", "step_000004.ckpt"]
    assert names(made / "last.ckpt") == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    first, second = ((made / "last.ckpt" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1))
    assert 0.5 < second / first < 2


@pytest.mark.slow
@pytest.mark.parametrize("hold", some(["parameters", "shards"], "shards"))
def test_a_folder_holds_the_same_bits_as_a_file(tmp_path, hold):
    for fits in on_ranks(saved.both_forms, str(tmp_path), hold):
        assert fits["steps"] == sharded.BATCHES
    for name in ("validated", "ended"):
        assert_same(load(tmp_path / f"{name}-folder.ckpt"), load(tmp_path / f"{name}-file.ckpt"))


@pytest.mark.parametrize(
    ("before", "after", "distributed"),
    [(2, 1, True), slow(1, 2, True), slow(2, 4, True), slow(4, 2, True), slow(2, 4, False), slow(2, 1, False)],
)
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path, before, after, distributed):
    on_ranks(saved.stopped if distributed else saved.stopped_as_file, before, str(tmp_path), size=before)
    for hold in ("parameters", "shards"):
        for fits in on_ranks(saved.continued, after, f"{tmp_path}/last.ckpt", hold, size=after):
            torch.testing.assert_close(fits["weights"], alone()["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["unified", slow("auto")])
def test_one_process_goes_on_with_a_folder(made, strategy):
    plugins = [] if strategy == "unified" else [AtomicCheckpointIO()]
    fits = sharded.trained(strategy, ranks=1, rank=0, ckpt_path=str(made / "last.ckpt"), plugins=plugins)

    torch.testing.assert_close(fits["weights"], alone()["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("hold", some(["parameters", "shards"], "shards"))
def test_a_test_begins_with_the_weights_of_a_folder(made, hold):
    first, second = on_ranks(saved.evaluated, str(made / "last.ckpt"), hold)

    module = sharded.Deep().double()
    module.load_state_dict(load(made / "last.ckpt")["state_dict"])
    losses = torch.stack([module.loss(batch) for batch in module.test_dataloader()])
    rows = torch.tensor([len(batch["tokens"]) for batch in module.test_dataloader()])
    assert first["test"] == second["test"] == pytest.approx(float((losses.detach() * rows).sum() / rows.sum()))


@pytest.mark.slow
def test_a_killed_rank_leaves_the_checkpoint_before(tmp_path):
    first, second = on_ranks(saved.struck, str(tmp_path), "killed", (2,))

    assert (first.kind, second.kind) == ("RankError", "Gone")
    assert "rank 1" in first.text
    assert load(tmp_path / "last.ckpt")["epoch"] == 0


@pytest.mark.slow
def test_what_a_killed_first_rank_left_is_removed_by_the_next_save(tmp_path):
    stale = tmp_path / f".other.ckpt@{os.uname().nodename}@999999.partial"
    stale.mkdir()
    foreign = tmp_path / ".other.ckpt@elsewhere@999999.partial"
    foreign.mkdir()
    for fits in on_ranks(saved.struck, str(tmp_path), "never", ()):
        assert fits["steps"] == 2 * sharded.BATCHES

    assert names(tmp_path) == [foreign.name, "last.ckpt"]
    assert load(tmp_path / "last.ckpt")["epoch"] == 1


def test_a_rank_killed_between_two_renames_loses_nothing(tmp_path):
    on_ranks(saved.killed_between, str(tmp_path))
    assert not (tmp_path / "last.ckpt").exists()

    assert load(tmp_path / "last.ckpt")["epoch"] == 0
    assert put_back(tmp_path / "last.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"), [("full", "No space left on device"), slow("memory", "memory ran out on rank 1")]
)
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path, kind, words):
    for ended in on_ranks(saved.struck, str(tmp_path), kind, (2, 3)):
        assert ended.kind == "CheckpointError"
        assert words in ended.text
        assert "rank 1" in ended.text
    assert names(tmp_path) == ["last.ckpt"]
    assert load(tmp_path / "last.ckpt")["epoch"] == 0


@pytest.mark.slow
def test_memory_that_runs_out_once_while_saving_costs_a_second_attempt(tmp_path):
    for fits in on_ranks(saved.struck, str(tmp_path), "memory", (2,)):
        assert fits["steps"] == 2 * sharded.BATCHES
    assert load(tmp_path / "last.ckpt")["epoch"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "files"), [("once", ["last.ckpt", "step_000004.ckpt"]), ("always", ["last.ckpt"])])
def test_memory_that_runs_out_while_gathering_leaves_whole_files(tmp_path, phase, files):
    for fits in on_ranks(saved.saves_a_file_through, phase, str(tmp_path)):
        assert fits["saved"] == files
        assert fits["steps"] == 6


@pytest.mark.slow
def test_model_checkpoint_keeps_and_deletes_folders(tmp_path):
    for fits in on_ranks(saved.with_model_checkpoint, str(tmp_path)):
        assert names(tmp_path) == ["last.ckpt", Path(fits["best"]).name]
    assert load(tmp_path / "last.ckpt")["epoch"] == 2


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__1_0.distcp"])
def test_a_folder_without_one_of_its_files_is_named(folder, name):
    (folder / name).unlink()
    (folder.parent / "best.ckpt").mkdir()

    text = rf"last\.ckpt is not a whole distributed checkpoint: it has no {name}\. Give .*beside it are best\.ckpt"
    with pytest.raises(CheckpointError, match=text):
        load(folder)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["cut short", "noise"])
def test_a_damaged_folder_is_named(folder, name, damage):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(
        content[: len(content) // 2] if damage == "cut short" else random.randbytes(len(content))
    )

    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a whole distributed checkpoint"):
        load(folder)


def test_a_record_that_announces_more_bytes_than_exist_is_damaged(folder):
    (folder / ".metadata").write_bytes(b"\x80\x05\x96" + 8 * b"\xff")  # a bytearray of 2**64 - 1 bytes
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged \(OverflowError\)"):
        load(folder)


def test_a_folder_that_names_code_is_refused(folder, tmp_path):
    class Code:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (folder / ".metadata").write_bytes(pickle.dumps(Code()))
    with pytest.raises(CheckpointError, match=r"more than torch's records \(posix\.mkdir\)"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_with_foreign_objects_needs_trust(folder):
    rest = torch.load(folder / "meta.pt")
    torch.save({**rest, "path": folder}, folder / "meta.pt")

    with pytest.raises(CheckpointError, match=r"holds pathlib.*pass weights_only=False"):
        load(folder)
    assert AtomicCheckpointIO().load_checkpoint(folder, weights_only=False)["path"] == folder


def test_commands_read_a_folder_without_its_optimizers(folder):
    plain = read_plain(folder)

    assert "optimizer_states" not in plain
    assert torch.equal(plain["state_dict"]["norm.weight"], load(folder)["state_dict"]["norm.weight"])
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(RuntimeError, match="cannot be read as a checkpoint"):
        read_plain(folder)


def test_a_plugin_that_writes_files_is_refused(made):
    strategy = UnifiedFSDPStrategy()
    strategy.checkpoint_io = AsyncCheckpointIO()

    with pytest.raises(
        ConfigurationError, match=r"AsyncCheckpointIO writes one file.*save_distributed_checkpoint=False"
    ):
        strategy._refuse_plugin()


def test_a_value_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ConfigurationError, match="save_distributed_checkpoint='yes': give true or false"):
        UnifiedFSDPStrategy(save_distributed_checkpoint="yes")
