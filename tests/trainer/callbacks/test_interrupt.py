"""One signal saves and ends a run; a second one ends it at once.

The signals are real and have processes of their own.
"""

import os
import signal
import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_unified.callbacks import GracefulInterrupt, RunCheckpoint
from tests.support import ROOT
from tests.support.lanes import first_cells, some
from tests.support.programs import run_program

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = ROOT / "tests" / "support" / "runs" / "small.py"


def run_script(folder, *arguments):
    return run_program(SCRIPT, folder, *arguments)


def kill(number=signal.SIGTERM):
    return lambda _: os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 0)])
def test_a_killed_run_saves_says_how_to_go_on_and_ends_where_an_unkilled_one_does(small_run, tmp_path, name, code):
    killed = run_script(tmp_path / "b", "--accumulate", "2", "--kill-at", "6", "--signal", name)
    options = {**small_run.SCRIPT_OPTIONS, "accumulate_grad_batches": 2}
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    last = tmp_path / "b/last.ckpt"
    resumed, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=last, **options)

    assert killed.returncode == code, killed.stderr
    # the sixth batch, first of the second epoch, begins a window: its step ends with the seventh
    assert f"Stopped by {name} after step 4. Saved {last}" in killed.stdout
    assert "Go on with: python small_run.py --resume" in killed.stdout
    assert "step=4 validations=3" in killed.stdout
    assert f"{name}: finishing this step, then saving" in killed.stderr
    assert small_run.same_weights(straight, resumed)


@pytest.mark.slow
def test_two_processes_stop_after_the_same_step_and_resume_with_their_own_draws(tmp_path):
    straight = run_script(tmp_path / "a", "--devices", "2")
    killed = run_script(tmp_path / "b", "--devices", "2", "--kill-at", "7")
    resumed = run_script(tmp_path / "b", "--devices", "2", "--resume", str(tmp_path / "b/last.ckpt"))

    assert (straight.returncode, killed.returncode, resumed.returncode) == (0, 143, 0), killed.stderr
    assert "rank=0 step=7" in killed.stdout
    assert "rank=1 step=7" in killed.stdout
    a, b = (torch.load(tmp_path / name / "weights.pt") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_sigterm_ends_the_process_at_once(tmp_path):
    killed = run_script(tmp_path, "--kill-at", "7", "--signals", "2")

    assert killed.returncode == -signal.SIGTERM
    saved = torch.load(tmp_path / "last.ckpt")["global_step"]
    said = f"SIGTERM again: stopping at once. Kept: {tmp_path / 'last.ckpt'} of step {saved}, of 7 done."
    assert f"{said}\nGo on with: python small_run.py --resume" in killed.stderr
    assert saved < 7
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.slow
def test_a_second_sigint_is_the_keyboard_interrupt_it_would_have_been(tmp_path):
    killed = run_script(tmp_path, "--kill-at", "7", "--signals", "2", "--signal", "SIGINT")

    assert killed.returncode == 1
    assert "step=" not in killed.stdout


def test_the_first_signal_stops_after_its_step_without_validating(small_run, tmp_path):
    interrupt = GracefulInterrupt()
    callbacks = [small_run.StopAfterBatch(4, act=kill()), interrupt, RunCheckpoint(tmp_path)]
    module, trainer = small_run.fit(tmp_path, callbacks=callbacks, val_check_interval=4, check_val_every_n_epoch=None)

    assert (trainer.global_step, module.validations) == (4, 0)
    assert interrupt.signal is signal.SIGTERM
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4


def test_a_run_without_a_signal_has_none_to_tell(small_run, tmp_path):
    interrupt = GracefulInterrupt()
    _, trainer = small_run.fit(tmp_path, callbacks=[interrupt, RunCheckpoint(tmp_path)])

    assert interrupt.signal is None
    assert trainer.global_step == 12


def test_minimum_steps_and_epochs_do_not_hold_the_stop_up(small_run, tmp_path):
    callbacks = [small_run.StopAfterBatch(3, act=kill()), GracefulInterrupt(), RunCheckpoint(tmp_path)]
    _, trainer = small_run.fit(tmp_path, callbacks=callbacks, min_steps=10, min_epochs=2)

    assert trainer.global_step == 3
    assert trainer.min_steps == 10


def test_validation_is_as_it_was_for_the_next_call(small_run, tmp_path):
    callbacks = [small_run.StopAfterBatch(3, act=kill()), GracefulInterrupt(), RunCheckpoint(tmp_path)]
    module, trainer = small_run.fit(tmp_path, callbacks=callbacks)

    assert trainer.limit_val_batches == 1.0
    assert trainer.validate(module, small_run.validation_loader(), verbose=False)


def test_a_running_validation_is_left_and_its_half_result_forgotten(small_run, tmp_path):
    class KillInValidation(Callback):
        batches = 0

        def on_validation_batch_start(self, *_):
            self.batches += 1
            if self.batches == 3:  # the first of two, in the second validation
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    killer, checkpoint = KillInValidation(), RunCheckpoint(tmp_path / "b")
    _, trainer = small_run.fit(tmp_path, callbacks=[killer, GracefulInterrupt(), checkpoint], **options)
    resumed, _ = small_run.fit(
        tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], resume=tmp_path / "b/last.ckpt", seed=99, **options
    )

    assert (trainer.global_step, killer.batches) == (6, 3)
    assert checkpoint.best_model_score == pytest.approx(
        torch.load(tmp_path / "b/best.ckpt")["callbacks"]["RunCheckpoint"]["best_score"]
    )
    assert torch.load(tmp_path / "b/best.ckpt")["global_step"] == 3
    assert small_run.same_weights(straight, resumed)


class KillInValidation(Callback):
    """Asks for a stop at a validation batch, counted over the run."""

    def __init__(self, at):
        self.at, self.batches = at, 0

    def on_validation_batch_start(self, *_):
        self.batches += 1
        if self.batches == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class Trained(Callback):
    """Notes epoch and number of each batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append((trainer.current_epoch, batch_idx))


@first_cells(1, "at", some([1, 2, 3, 4], 1, 4))
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 5, "check_val_every_n_epoch": None}], ids=str
)
def test_a_run_stopped_in_an_epochs_last_validation_resumes_with_the_next_epoch(small_run, tmp_path, options, at):
    options = {"max_epochs": 3, "max_steps": -1, **options}
    whole, first, second = Trained(), Trained(), Trained()
    straight, _ = small_run.fit(tmp_path, callbacks=[whole, RunCheckpoint(tmp_path / "a")], **options)
    callbacks = [first, KillInValidation(at), GracefulInterrupt(), RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, **options)
    callbacks = [second, RunCheckpoint(tmp_path / "b")]
    resumed, _ = small_run.fit(tmp_path, callbacks=callbacks, resume=tmp_path / "b/last.ckpt", seed=99, **options)

    assert len(first.batches) in (5, 10)
    assert [*first.batches, *second.batches] == whole.batches
    assert small_run.same_weights(straight, resumed)


def test_without_run_checkpoint_the_state_is_saved_beside(small_run, tmp_path, capsys):
    callbacks = [small_run.StopAfterBatch(3, act=kill()), GracefulInterrupt()]
    small_run.fit(tmp_path, callbacks=callbacks, enable_checkpointing=False)

    assert torch.load(tmp_path / "interrupted.ckpt")["global_step"] == 3
    assert f'ckpt_path="{tmp_path / "interrupted.ckpt"}"' in capsys.readouterr().out


def test_handlers_are_as_they_were_after_fit(small_run, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    callbacks = [small_run.StopAfterBatch(3, act=kill()), GracefulInterrupt(), RunCheckpoint(tmp_path)]
    small_run.fit(tmp_path, callbacks=callbacks)

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_after_an_exception_a_signal_does_what_it_did_before(small_run, tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        small_run.fit(tmp_path, callbacks=[Fails(), GracefulInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_users_handler_gets_the_second_signal(small_run, tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("heard"))

    def twice(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        small_run.fit(tmp_path, callbacks=[small_run.StopAfterBatch(3, act=twice), GracefulInterrupt()])
    finally:
        signal.signal(signal.SIGTERM, before)

    assert heard == ["heard"]


def test_before_the_first_batch_a_signal_does_what_it_did_before(small_run, tmp_path):
    class KillInSetup(Callback):
        def on_fit_start(self, *_):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit):
        small_run.fit(tmp_path, callbacks=[KillInSetup(), GracefulInterrupt()])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_outside_the_main_thread_it_says_so_and_does_nothing(small_run, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    result = {}

    def train():
        with pytest.warns(UserWarning, match="fit does not run in the main thread"):
            result["steps"] = small_run.fit(tmp_path, callbacks=[GracefulInterrupt()])[1].global_step

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

    assert result["steps"] == 12
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_on_another_process_stops_this_one_after_the_same_step(small_run, tmp_path, monkeypatch):
    """A strategy stands for two processes.

    It reduces with a neighbour that has received SIGTERM by step 4.
    """
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Neighboured(SingleDeviceStrategy):
        def reduce(self, tensor, *args, reduce_op="mean", **kwargs):
            if reduce_op != "max":
                return tensor
            return torch.maximum(tensor, torch.tensor(15 if self.lightning_module.trainer.global_step >= 4 else 0))

    interrupt = GracefulInterrupt()
    module, trainer = small_run.build(
        tmp_path, callbacks=[interrupt, RunCheckpoint(tmp_path)], strategy=Neighboured("cpu")
    )
    monkeypatch.setattr(type(trainer), "world_size", 2)
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())

    assert trainer.global_step == 4
    assert interrupt.signal is signal.SIGTERM


def test_a_signal_that_comes_while_processes_agree_stops_them_a_step_later(small_run, tmp_path, monkeypatch):
    """A strategy stands for two processes; SIGTERM comes after this one has told the other of none."""
    from lightning.pytorch.strategies import SingleDeviceStrategy

    steps = []

    class Interrupted(SingleDeviceStrategy):
        def reduce(self, tensor, *args, reduce_op="mean", **kwargs):
            if reduce_op == "max":
                steps.append(self.lightning_module.trainer.global_step)
                if steps.count(3) == 1 and steps[-1] == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
            return tensor

    interrupt = GracefulInterrupt()
    module, trainer = small_run.build(
        tmp_path, callbacks=[interrupt, RunCheckpoint(tmp_path)], strategy=Interrupted("cpu")
    )
    monkeypatch.setattr(type(trainer), "world_size", 2)
    trainer.fit(module, small_run.StatefulLoader(), small_run.validation_loader())

    assert trainer.global_step == 4
    assert interrupt.signal is signal.SIGTERM
