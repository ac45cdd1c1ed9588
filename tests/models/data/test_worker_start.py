"""Loader processes start beside the run, which makes its first batches itself."""

import multiprocessing
import os
import time
from multiprocessing import forkserver

import numpy as np
import pytest
import torch

from lightning_unified.data.loader import BatchRows, LoaderOptions, ResumableLoader
from lightning_unified.data.worker_start import start_server
from tests.support.lanes import first_cells

COUNT = 1000
MORE_THAN_A_PIPE = 2**20


class Gate:
    """Something that is unpickled only once a file exists."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _opened, (self.path,)


def _opened(path):
    while not path.exists():
        time.sleep(0.01)
    return Gate(path)


class Broken:
    """Something that ends the process that unpickles it."""

    def __reduce__(self):
        return _ended, ()


def _ended():
    os._exit(1)


class Rows(BatchRows):
    """Rows that tell the process that made them, after `first` in their pickled state."""

    def __init__(self, first):
        self.first, self.rest = first, bytes(MORE_THAN_A_PIPE)
        self.bucket_of, self.checksum = np.zeros(COUNT, dtype=np.int64), 0

    def __len__(self):
        return COUNT

    def __getitems__(self, indices):
        return {"rows": torch.tensor(indices), "process": torch.tensor([os.getpid()] * len(indices))}


def loader(first=None, **changes):
    return ResumableLoader(Rows(first), LoaderOptions(**{"batch_size": 1, "num_workers": 1} | changes))


def numbers(batches):
    return [int(batch["rows"]) for batch in batches]


def slowly(batches):
    for _ in batches:
        time.sleep(0.02)


def is_made_here(batch):
    return int(batch["process"]) == os.getpid()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "open")


@first_cells(1, "method", ["forkserver", "spawn"])
def test_batches_are_made_here_until_the_processes_run(gate, method):
    batches, seen = iter(loader(gate, start_method=method, persistent_workers=True)), []
    for batch in batches:
        assert is_made_here(batch) or gate.path.exists()
        seen.append(batch)
        if len(seen) == 3:
            gate.path.touch()
        if not is_made_here(batch):
            break
        time.sleep(0.02)
    seen += batches
    here = [is_made_here(batch) for batch in seen]

    assert 3 <= sum(here) < COUNT
    assert here == sorted(here, reverse=True)
    assert numbers(seen) == numbers(loader(num_workers=0))


def test_persistent_processes_make_all_batches_of_a_second_epoch(gate):
    gate.path.touch()
    running = loader(gate, start_method="forkserver", persistent_workers=True)
    list(running)

    assert not any(map(is_made_here, running))


def test_an_iteration_broken_off_while_processes_start_takes_no_batch_of_the_next(gate):
    running = loader(gate, start_method="forkserver", persistent_workers=True)
    first = iter(running)
    next(first)
    gate.path.touch()
    running.set_epoch(5)
    whole = loader(num_workers=0)
    whole.set_epoch(5)

    assert numbers(running) == numbers(whole)


def test_processes_that_die_as_they_start_end_the_run():
    with pytest.raises((OSError, RuntimeError)):
        slowly(loader(Broken(), start_method="forkserver"))


@pytest.fixture
def server(monkeypatch):
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    started = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(server))
    return server, started


def test_the_server_imports_for_all_processes_and_keeps_the_users_modules(server):
    server, started = server
    server.set_forkserver_preload(["json"])
    for _ in range(2):
        start_server(LoaderOptions(batch_size=1, num_workers=4, start_method="forkserver"))

    assert server._preload_modules == ["json", "torch.utils.data", "lightning_unified.data.loader"]
    assert started == [server, server]


def test_the_users_choice_of_a_start_method_stays_open(server, monkeypatch):
    context = multiprocessing.context.DefaultContext(multiprocessing.get_context("forkserver"))
    for name in ("get_start_method", "get_all_start_methods"):
        monkeypatch.setattr(multiprocessing, name, getattr(context, name))
    start_server(LoaderOptions(batch_size=1, num_workers=1))

    assert context.get_start_method(allow_none=True) is None
    assert len(server[1]) == (context.get_all_start_methods()[0] == "forkserver")


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "start_method": "fork"}])
def test_no_server_starts_without_a_need(server, options):
    start_server(LoaderOptions(**{"batch_size": 1, "start_method": "forkserver"} | options))

    assert server[1] == []
