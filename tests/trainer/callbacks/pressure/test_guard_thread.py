"""The thread that samples memory pressure ends with the fit, and works while a batch hangs."""

import json
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.support import ROOT
from tests.trainer.callbacks.pressure.guards import A_MOMENT, Threaded, actions

pytestmark = pytest.mark.filterwarnings("ignore")


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "memory-pressure"]


def test_the_thread_ends_with_fit(small_run, tmp_path):
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, *_):
            seen.append(len(watchers()))

    small_run.fit(tmp_path, callbacks=[Threaded("normal"), Looks()])

    assert set(seen) == {1}
    assert watchers() == []


def test_the_thread_ends_with_an_exception(small_run, tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        small_run.fit(tmp_path, callbacks=[Threaded("normal"), Fails()])

    assert watchers() == []


def test_a_reader_that_fails_is_unknown_and_said_once(small_run, tmp_path, caplog):
    guard = Threaded("broken")
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        _, trainer = small_run.fit(tmp_path, callbacks=[guard])

    assert trainer.global_step == 12
    assert caplog.text.count("Memory pressure cannot be read: OSError: as planned") == 1


def test_pressure_is_on_the_disk_while_a_batch_hangs(small_run, tmp_path):
    class Hangs(Callback):
        noticed = None

        def on_before_optimizer_step(self, *_):
            for _ in range(1000):
                if self.noticed is None and actions(tmp_path):
                    self.noticed = json.loads((tmp_path / "pressure.jsonl").read_text().splitlines()[0])
                if self.noticed is not None:
                    break
                time.sleep(A_MOMENT)

    hangs = Hangs()
    small_run.fit(tmp_path, callbacks=[Threaded("warn"), hangs], max_steps=1)

    assert {name: hangs.noticed[name] for name in ("level", "available_bytes", "stall_share", "reasons", "action")} == {
        "level": "warn",
        "available_bytes": 1000,
        "stall_share": 0.5,
        "reasons": ["the test says warn"],
        "action": "noticed",
    }
    assert hangs.noticed["swap_out_bytes_per_s"] is None


SCRIPT = """
import importlib.util, sys, time
from pathlib import Path
from lightning_unified import PressureGuard
from lightning_unified.hardware import PressureReader, Sources
spec = importlib.util.spec_from_file_location("small_run", sys.argv[1])
small_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small_run)
folder = Path(sys.argv[2])
(folder / "meminfo").write_text(f"MemTotal: {16 << 20} kB\\nMemAvailable: {100 << 10} kB\\n")

class Starved(PressureGuard):
    def reader(self):
        reader = PressureReader(Sources(torch=None, proc=folder))
        return lambda: reader.read(time.monotonic())

guard = Starved(every_s=0.01)
_, trainer = small_run.fit(folder, callbacks=[guard, small_run.RunCheckpoint(folder)], max_steps=100_000)
print(f"step={trainer.global_step}", guard.stopped_for)
"""


@pytest.mark.slow
def test_a_starved_process_saves_and_ends_by_itself(tmp_path):
    small = str(ROOT / "tests" / "support" / "runs" / "small.py")
    command = [sys.executable, "-c", SCRIPT, small, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    step = torch.load(tmp_path / "last.ckpt")["global_step"]

    assert done.returncode == 0, done.stderr
    assert f"step={step} memory pressure: only 100.00 MiB of 16.00 GiB is available (MemAvailable)" in done.stdout
    assert actions(tmp_path)[-1] == f"stopped at step {step}, state in {tmp_path / 'last.ckpt'}"
