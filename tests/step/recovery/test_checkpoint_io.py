"""A checkpoint file is whole or not there, and a damaged one says so."""

import os
import resource
import tracemalloc

import pytest
import torch

from lightning_unified.errors import CheckpointError
from lightning_unified.files.atomic import publish, remove_partial_files, share
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path):
    AtomicCheckpointIO().save_checkpoint({"w": torch.arange(3), "n": 2}, tmp_path / "new/a.ckpt")
    loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / "new/a.ckpt")

    assert loaded["n"] == 2
    assert torch.equal(loaded["w"], torch.arange(3))
    assert names(tmp_path / "new") == ["a.ckpt"]


def test_a_reader_with_the_old_file_open_keeps_the_old_file(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    with (tmp_path / "a.ckpt").open("rb") as old:
        io.save_checkpoint({"n": 2}, tmp_path / "a.ckpt")

        assert torch.load(old)["n"] == 1
    assert io.load_checkpoint(tmp_path / "a.ckpt")["n"] == 2


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"n": 1}, tmp_path / "a.ckpt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"a\.ckpt.*File too large.*earlier file .* untouched.*are free there"
        ):
            io.save_checkpoint({"w": torch.zeros(100_000)}, tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert names(tmp_path) == ["a.ckpt"]
    assert io.load_checkpoint(tmp_path / "a.ckpt")["n"] == 1


def test_a_write_that_is_interrupted_leaves_no_part(tmp_path, monkeypatch):
    def interrupt(checkpoint, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt")

    assert names(tmp_path) == []


def test_memory_that_runs_out_while_saving_is_tried_once_more(tmp_path, monkeypatch):
    save, calls = torch.save, []

    def fails_first(checkpoint, file):
        calls.append(1)
        if len(calls) == 1:
            file.write(b"half")
            raise MemoryError
        save(checkpoint, file)

    monkeypatch.setattr(torch, "save", fails_first)
    AtomicCheckpointIO().save_checkpoint({"n": 1}, tmp_path / "a.ckpt")

    assert torch.load(tmp_path / "a.ckpt") == {"n": 1}
    assert names(tmp_path) == ["a.ckpt"]


def test_memory_that_runs_out_twice_while_saving_is_a_failed_write(tmp_path, monkeypatch):
    def fails(checkpoint, file):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    AtomicCheckpointIO().save_checkpoint({"n": 0}, tmp_path / "a.ckpt")
    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(CheckpointError, match=r"could not write .*CUDA out of memory.*earlier file .* untouched"):
        AtomicCheckpointIO().save_checkpoint({"n": 1}, tmp_path / "a.ckpt")

    assert torch.load(tmp_path / "a.ckpt") == {"n": 0}


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be saved; the text before names it"):
        AtomicCheckpointIO().save_checkpoint({"f": lambda: 0}, tmp_path / "a.ckpt")

    assert names(tmp_path) == []


def test_saving_keeps_no_second_copy_in_memory(tmp_path):
    state = {f"w{i}": torch.zeros(1_000_000) for i in range(8)}
    tracemalloc.start()
    AtomicCheckpointIO().save_checkpoint(state, tmp_path / "a.ckpt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8_000_000 < (tmp_path / "a.ckpt").stat().st_size


@pytest.mark.parametrize("content", [b"", os.urandom(1000), b"PK\x03\x04" + bytes(500)])
def test_a_damaged_file_is_named_with_what_is_beside_it(tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    (tmp_path / "best.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is not a whole checkpoint .*beside it are best\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_a_file_cut_short_is_damaged(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"w": torch.zeros(10_000)}, tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="no other checkpoint is beside it"):
        io.load_checkpoint(tmp_path / "a.ckpt")


def test_a_file_with_foreign_objects_is_not_called_damaged(tmp_path):
    torch.save({"path": tmp_path}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"holds pathlib.*If you trust the file, pass weights_only=False"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")

    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["path"] == tmp_path


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "nothing.ckpt")


def test_sharing_costs_no_second_file(tmp_path):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    share(tmp_path / "a", tmp_path / "b")
    share(tmp_path / "a", tmp_path / "b")

    assert os.path.samefile(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["a", "b"]


def test_sharing_copies_where_there_are_no_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "not permitted")

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "a").write_text("new")
    share(tmp_path / "a", tmp_path / "b")

    assert (tmp_path / "b").read_text() == "new"
    assert not os.path.samefile(tmp_path / "a", tmp_path / "b")


def test_publishing_replaces_a_folder(tmp_path):
    for name in ("new.partial", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text(name)
    publish(tmp_path / "new.partial", tmp_path / "target")

    assert (tmp_path / "target/part").read_text() == "new.partial"
    assert names(tmp_path) == ["target"]


def test_only_partial_files_are_removed(tmp_path):
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".y.partial").write_text("")
    (tmp_path / "z.partial").write_text("")
    remove_partial_files(tmp_path)

    assert names(tmp_path) == ["z.partial"]
