"""The command `watch`: once, live, logged, stopped, and beside a training run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_unified.cli.main import main
from lightning_unified.cli.watch.command import main as watch
from tests.support.lanes import slow

GIB = 2**30
KEYS = ["time", "host", "pressure", "swap", "devices", "runs"]


def test_once_prints_the_view(capsys):
    assert main(["watch", "--once"]) == 0
    printed = capsys.readouterr().out

    assert "pressure" in printed and "Memory" in printed and "Runs" in printed


def test_once_as_json_is_a_single_object(capsys):
    assert watch(["--once", "--json"]) == 0
    out = capsys.readouterr().out

    assert list(json.loads(out)) == KEYS
    assert out.count("\n") == 1


def test_a_log_grows_by_a_line_and_keeps_what_it_had(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text('{"earlier": true}\n')
    assert watch(["--once", "--log", str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]

    assert lines[0] == {"earlier": True} and list(lines[1]) == KEYS


def test_a_log_that_cannot_be_opened_makes_no_sense(tmp_path, capsys):
    assert watch(["--once", "--log", str(tmp_path / "absent" / "log")]) == 2
    captured = capsys.readouterr()

    assert "cannot be written: No such file or directory; name a file in a folder that is there" in captured.err
    assert captured.out == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_log_whose_disk_is_full_ends_the_watch_and_says_so(capsys):
    assert watch(["--once", "--log", "/dev/full"]) == 1
    assert "--log /dev/full could not be written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "1e9"])
def test_an_interval_that_cannot_be_makes_no_sense(capsys, text):
    assert watch(["--every", text]) == 2
    assert f"{text} must be a number of seconds from 0.1 to 86400" in capsys.readouterr().err


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_unified", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), slow(signal.SIGTERM, 143)])
def test_a_live_watch_prints_line_after_line_until_it_is_stopped_without_a_word(number, code):
    process = start("--json", "--every", "0.1")
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert [list(json.loads(line)) for line in lines] == [KEYS, KEYS]
    assert (process.returncode, err) == (code, "")


@pytest.mark.parametrize("form", [["--json"], slow([])])
def test_a_reader_that_has_enough_is_no_failure(form):
    process = start(*form, "--every", "0.1")
    process.stdout.readline()
    process.stdout.close()

    assert (process.wait(timeout=60), process.stderr.read()) == (0, "")
    process.stderr.close()


def test_watching_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_unified.cli.main import main; main(['watch', '--once'])\n"
        "print(*sorted({'torch', 'lightning'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr.split() == []


TRAIN = """
import sys, time
import lightning as L, torch, lightning_unified
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

class Slow(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 100000), batch_size=8)
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.step(batch).mean()

strategy = lightning_unified.UnifiedStrategy(budget="2GiB", micro_batch_size=4)
L.Trainer(strategy=strategy, accelerator="cpu", max_steps=100000, logger=False, enable_checkpointing=False, enable_progress_bar=False,
          limit_val_batches=0, enable_model_summary=False, default_root_dir=sys.argv[1]).fit(Slow())
"""


@pytest.mark.slow
def test_a_training_process_shows_its_micro_batch_and_is_gone_once_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIGHTNING_UNIFIED_STATE_DIR", str(tmp_path / "state"))
    process = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        deadline, runs = time.monotonic() + 90, []
        while not (runs and runs[0]["micro_batch_size"]) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            assert watch(["--once", "--json"]) == 0
            runs = json.loads(capsys.readouterr().out)["runs"]
    finally:
        process.kill()
        process.wait()
    (run,) = runs

    assert (run["pid"], run["module"], run["device"]) == (process.pid, "Slow", "cpu")
    assert (run["effective_batch_size"], run["micro_batch_size"], run["budget_bytes"]) == (8, 4, 2 * GIB)
    assert run["step"] > 0 and run["peak_bytes"] > 0 and run["directory"] == str(tmp_path)
    assert watch(["--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert list((tmp_path / "state" / "runs").iterdir()) == []
