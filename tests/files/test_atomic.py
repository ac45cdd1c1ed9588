"""Files and folders are replaced whole, also by a process that ends in the middle."""

import os
from pathlib import Path

import pytest

from lightning_unified.files import atomic
from lightning_unified.files.atomic import publish, put_back, remove, remove_partial_files, share


def make(path, content, *, folder):
    if folder:
        path.mkdir()
        path = path / "part"
    path.write_text(content)


def content_of(path):
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.fixture(params=["one exchange", "two renames"])
def system(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    return request.param


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("new", ["file", "folder"])
@pytest.mark.parametrize("old", ["file", "folder", "link to a folder"])
def test_a_file_or_folder_replaces_either(tmp_path, old, new):
    make(tmp_path / "new.partial", "new", folder=new == "folder")
    if old == "link to a folder":
        make(tmp_path / "elsewhere", "old", folder=True)
        (tmp_path / "target").symlink_to("elsewhere")
    else:
        make(tmp_path / "target", "old", folder=old == "folder")
    publish(tmp_path / "new.partial", tmp_path / "target")

    assert content_of(tmp_path / "target") == "new"
    assert sorted(os.listdir(tmp_path)) == (["elsewhere", "target"] if old == "link to a folder" else ["target"])
    if old == "link to a folder":
        assert content_of(tmp_path / "elsewhere") == "old"


@pytest.mark.parametrize("stops_at", [1, 2])
@pytest.mark.parametrize("start", [put_back, lambda path: remove_partial_files(path.parent)])
def test_a_folder_is_there_after_a_stop_between_two_renames(tmp_path, monkeypatch, stops_at, start):
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    make(tmp_path / ".target.1.partial", "new", folder=True)
    make(tmp_path / "target", "old", folder=True)
    calls, rename = [], Path.rename

    def stopping(path, other):
        calls.append(path)
        if len(calls) > stops_at:
            raise KeyboardInterrupt
        return rename(path, other)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stopping)
        if stops_at == 1:
            with pytest.raises(KeyboardInterrupt):
                publish(tmp_path / ".target.1.partial", tmp_path / "target")
        else:
            publish(tmp_path / ".target.1.partial", tmp_path / "target")
    start(tmp_path / "target")

    assert content_of(tmp_path / "target") == ("old" if stops_at == 1 else "new")


def test_what_is_there_is_not_put_back(tmp_path):
    make(tmp_path / "target", "new", folder=True)
    make(tmp_path / ".target.7.old.partial", "old", folder=True)

    assert put_back(tmp_path / "target")
    assert content_of(tmp_path / "target") == "new"
    assert not put_back(tmp_path / "nothing")
    assert not put_back(tmp_path / "no/folder")


def test_a_folder_that_is_half_removed_does_not_bear_its_name(tmp_path, monkeypatch):
    make(tmp_path / "old.ckpt", "old", folder=True)
    monkeypatch.setattr(atomic.shutil, "rmtree", lambda *_: None)
    remove(tmp_path / "old.ckpt")

    assert [path.name for path in tmp_path.iterdir()] == [f".old.ckpt.{os.getpid()}.partial"]


def test_a_folder_is_shared_by_links(tmp_path):
    make(tmp_path / "step", "new", folder=True)
    make(tmp_path / "last", "old", folder=True)
    share(tmp_path / "step", tmp_path / "last")

    assert os.path.samefile(tmp_path / "step/part", tmp_path / "last/part")
    assert sorted(os.listdir(tmp_path)) == ["last", "step"]
