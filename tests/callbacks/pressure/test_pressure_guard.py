"""Under memory pressure a run gives way one rung at a time.

Without pressure the guard changes nothing.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.callbacks import GracefulInterrupt, PressureGuard, RunCheckpoint
from lightning_unified.callbacks.pressure.watch import PressureWatch
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import Figure, Pressure
from tests.support.lasting import Lasting

pytestmark = pytest.mark.filterwarnings("ignore")

A_MOMENT = 0.005  # seconds


def pressure(level):
    return Pressure(
        level=level,
        available=Figure(1000, "fake available"),
        swap_out_bytes_per_s=None,
        stall_share=0.5,
        reasons=() if level == "normal" else (f"the test says {level}",),
    )


class Scripted(PressureGuard):
    """Takes `per_batch` samples right before each batch ends.

    After the script's end its last level stays.
    """

    def __init__(self, *levels, per_batch=2, **options):
        super().__init__(**options)
        self.levels, self.per_batch = list(levels), per_batch

    def reader(self):
        return lambda: pressure(self.levels.pop(0) if len(self.levels) > 1 else self.levels[0])

    def on_train_batch_end(self, *arguments):
        for _ in range(self.per_batch):
            self._watch.sample()
        super().on_train_batch_end(*arguments)


class Threaded(PressureGuard):
    """Samples in its own thread, always the same level."""

    def __init__(self, level, **options):
        super().__init__(every_s=A_MOMENT, **options)
        self.level, self.read = level, 0

    def reader(self):
        def sample():
            self.read += 1
            if self.level == "broken":
                raise OSError("as planned")
            return pressure(self.level)

        return sample


@pytest.fixture
def by_hand(monkeypatch):
    """Samples come from the test, not from a thread."""
    monkeypatch.setattr(PressureWatch, "start", lambda self: None)


def actions(folder):
    path = folder / "pressure.jsonl"
    return [json.loads(line)["action"] for line in path.read_text().splitlines()] if path.exists() else []


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "memory-pressure"]


class Exact(LightningModule):
    """Linear layers in float64 and batches of eight rows.

    `rows` lists the rows of every run of `training_step`.
    """

    rows = Lasting(())

    def __init__(self, *, splittable=True):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.splittable = splittable

    def configure_micro_batches(self, stage):
        return MicroBatchRules(splittable=self.splittable)

    def training_step(self, batch, batch_idx):
        self.rows += (len(batch[0]),)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def exact_batches(count=10):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(8 * count, size, generator=generator, dtype=torch.float64) for size in (5, 1))
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit_exact(folder, *callbacks, splittable=True, strategy=None):
    module, strategy = Exact(splittable=splittable), strategy or UnifiedStrategy()
    trainer = Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, exact_batches())
    return module, trainer


@pytest.mark.parametrize("level", ["normal", "unknown"])
def test_without_pressure_nothing_happens(small_run, tmp_path, level):
    plain, _ = small_run.fit(tmp_path / "a")
    guard = Threaded(level)
    guarded, trainer = small_run.fit(tmp_path / "b", callbacks=[guard])

    assert guard.read > 0
    assert guard.stopped_for is None
    assert trainer.global_step == 12
    assert actions(tmp_path / "b") == []
    assert small_run.same_weights(plain, guarded)


def test_critical_pressure_takes_every_rung_in_turn_and_stops(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert actions(tmp_path) == [
        "noticed",
        "warned",
        "caches cleared",
        "shrink skipped: SingleDeviceStrategy cannot split its batches",
        "checkpoint due at step 3",
        f"stopped at step 4, state in {tmp_path / 'last.ckpt'}",
    ]
    assert guard.stopped_for == "memory pressure: the test says critical"
    assert trainer.global_step == 4
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4
    assert trainer.limit_val_batches == 1.0


def test_a_run_stopped_by_pressure_goes_on_to_where_an_undisturbed_one_ends(small_run, tmp_path, by_hand):
    straight, _ = small_run.fit(tmp_path / "a", callbacks=[RunCheckpoint(tmp_path / "a")])
    small_run.fit(tmp_path / "b", callbacks=[Scripted("critical"), RunCheckpoint(tmp_path / "b")])
    resumed, trainer = small_run.fit(
        tmp_path / "b", callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=tmp_path / "b/last.ckpt"
    )

    assert trainer.global_step == 12
    assert small_run.same_weights(straight, resumed)


def test_the_checkpoint_rung_is_on_the_disk_before_the_next_batch(small_run, tmp_path, by_hand):
    saved = []

    class Notes(Callback):
        def on_train_batch_start(self, *_):
            path = tmp_path / "last.ckpt"
            saved.append(torch.load(path)["global_step"] if path.exists() else None)

    guard = Scripted("critical", stop=False)
    small_run.fit(tmp_path, callbacks=[guard, Notes(), RunCheckpoint(tmp_path, monitor=None)], max_steps=5)

    assert saved == [None, None, None, 3, 3]
    assert actions(tmp_path)[-1] == "checkpoint due at step 3"
    assert guard.stopped_for is None


def test_one_sample_is_not_enough(small_run, tmp_path, by_hand):
    guard = Scripted(*["critical", "normal"] * 12, per_batch=1)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard])

    assert trainer.global_step == 12
    assert actions(tmp_path) == []


def test_a_warning_waits_five_samples_between_rungs_and_never_stops_the_run(small_run, tmp_path, by_hand):
    seen = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(len(actions(tmp_path)))

    guard = Scripted("warn", per_batch=1)
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, Notes(), RunCheckpoint(tmp_path)], max_steps=30)

    assert trainer.global_step == 30
    assert guard.stopped_for is None
    # two samples: noticed and warned; five more: caches; five more: the shrink that cannot be, and the checkpoint
    assert [seen.index(count) + 1 for count in (2, 3, 5)] == [2, 7, 12]
    assert seen[-1] == 5


def test_pressure_that_returns_goes_on_where_it_was(small_run, tmp_path, by_hand):
    levels = [*["critical"] * 4, *["normal"] * 6, *["critical"] * 4, "normal"]
    guard = Scripted(*levels, stop=False)
    small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert actions(tmp_path)[:9] == [
        "noticed",
        "warned",
        "caches cleared",
        "over",
        "down to rung 1 of 5",
        "noticed",
        "caches cleared",
        "shrink skipped: SingleDeviceStrategy cannot split its batches",
        f"checkpoint due at step {7}",
    ]


def test_a_micro_batch_that_shrinks_and_grows_back_learns_the_same(tmp_path, by_hand):
    plain, _ = fit_exact(tmp_path / "a")
    module, trainer = fit_exact(
        tmp_path / "b",
        Scripted("critical", "critical", "critical", "critical", "critical", "critical", "normal"),
        strategy=UnifiedStrategy(check_split=False),  # the exactness check would run further rows
    )

    assert actions(tmp_path / "b")[:6] == [
        "noticed",
        "warned",
        "caches cleared",
        "micro-batch shrunk to 4 rows",
        "over",
        "down to rung 2 of 5, micro-batch grown to 8 rows",
    ]
    assert (trainer.strategy.effective_batch_size, trainer.strategy.micro_batch_size) == (8, 8)
    assert module.rows == (8,) * 3 + (4,) * 6 + (8,) * 4
    assert "memory pressure is over" in trainer.strategy.plan.reasons["micro_batch_size"]
    assert plain.rows == (8,) * 10
    assert trainer.global_step == 10
    for name, weight in plain.state_dict().items():
        assert torch.allclose(weight, module.state_dict()[name], rtol=0, atol=1e-12), name


def test_a_module_that_cannot_be_cut_is_left_whole_and_the_next_rung_is_taken(tmp_path, by_hand):
    module, _ = fit_exact(tmp_path, Scripted("critical", stop=False), splittable=False)

    assert set(module.rows) == {8}
    assert actions(tmp_path)[3:] == [
        "shrink skipped: UnifiedStrategy cannot split its batches further",
        "checkpoint saved: pressure.ckpt",
    ]


def test_checkpoint_and_stop_wait_for_the_end_of_the_window(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)], accumulate_grad_batches=5)

    assert actions(tmp_path)[-2:] == [
        "checkpoint due at step 1",
        f"stopped at step 2, state in {tmp_path / 'last.ckpt'}",
    ]
    assert trainer.fit_loop.total_batch_idx + 1 == 10


def test_without_run_checkpoint_the_state_is_saved_beside(small_run, tmp_path, by_hand, caplog):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[Scripted("critical")], enable_checkpointing=False)

    assert torch.load(tmp_path / "pressure.ckpt")["global_step"] == 4
    assert f'ckpt_path="{tmp_path / "pressure.ckpt"}"' in caplog.text


def test_a_trial_run_keeps_nothing(small_run, tmp_path, by_hand):
    guard = Scripted("critical")
    _, trainer = small_run.fit(tmp_path, callbacks=[guard], fast_dev_run=5)

    assert trainer.global_step == 5
    assert guard.stopped_for is None
    assert list(tmp_path.iterdir()) == []


def test_the_warning_comes_once(small_run, tmp_path, by_hand, caplog):
    levels = [*["warn"] * 2, *["normal"] * 6, *["warn"] * 4, "normal"]
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[Scripted(*levels)])

    assert actions(tmp_path).count("warned") == 2
    assert caplog.text.count("running short of memory") == 1


def test_a_signal_in_the_same_batch_leaves_the_trainer_as_it_was(small_run, tmp_path, by_hand):
    class Kill(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    guard, interrupt = Scripted("critical"), GracefulInterrupt()
    _, trainer = small_run.fit(
        tmp_path, callbacks=[Kill(), guard, interrupt, RunCheckpoint(tmp_path)], min_steps=10, min_epochs=2
    )

    assert guard.stopped_for is not None
    assert interrupt.signal is signal.SIGTERM
    assert (trainer.global_step, trainer.min_steps, trainer.min_epochs, trainer.limit_val_batches) == (4, 10, 2, 1.0)


def test_pressure_on_another_process_makes_this_one_act_after_the_same_batch(small_run, tmp_path, by_hand, monkeypatch):
    """A strategy stands for two processes.

    It reduces with a neighbour that is critical from step 6.
    """
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Neighboured(SingleDeviceStrategy):
        def reduce(self, tensor, *args, reduce_op="mean", **kwargs):
            if reduce_op != "max":
                return tensor
            return torch.maximum(tensor, torch.tensor(2 if self.lightning_module.trainer.global_step >= 6 else -1))

    guard = Scripted("normal")
    module, trainer = small_run.build(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)], strategy=Neighboured("cpu"))
    monkeypatch.setattr(type(trainer), "world_size", 2)
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())

    assert trainer.global_step == 9
    assert guard.stopped_for == "memory pressure: on another process"


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


def test_an_unwritable_trace_is_said_once_and_the_run_still_gives_way(small_run, tmp_path, by_hand, caplog):
    (tmp_path / "file").write_text("in the way")
    guard = Scripted("critical", trace=tmp_path / "file" / "pressure.jsonl")
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        small_run.fit(tmp_path, callbacks=[guard, RunCheckpoint(tmp_path)])

    assert guard.stopped_for is not None
    assert caplog.text.count("no longer written") == 1


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
    small = str(Path(__file__).parents[2] / "support" / "runs" / "small.py")
    command = [sys.executable, "-c", SCRIPT, small, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    step = torch.load(tmp_path / "last.ckpt")["global_step"]

    assert done.returncode == 0, done.stderr
    assert f"step={step} memory pressure: only 100.00 MiB of 16.00 GiB is available (MemAvailable)" in done.stdout
    assert actions(tmp_path)[-1] == f"stopped at step {step}, state in {tmp_path / 'last.ckpt'}"


@pytest.mark.parametrize("options", [{"every_s": 0}, {"samples": 0}, {"every_s": float("nan")}])
def test_arguments_out_of_range_are_refused(options):
    assert PressureGuard(every_s=0.1, samples=1).stopped_for is None
    with pytest.raises(ConfigurationError, match=r"every_s=.*give seconds, more than 0|samples=.*1 or more"):
        PressureGuard(**options)
