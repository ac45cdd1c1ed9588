"""Hooks of automatic optimization act as under plain Lightning.

This holds for whole and split batches.
"""

import lightning as L
import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells, slow
from tests.support.lasting import Lasting
from tests.support.modules import hooks as users
from tests.support.modules.plain import weights

SPLIT = 3  # rows at once, of batches of 8, 8 and 3
EXACT = {"rtol": 1e-11, "atol": 1e-13}

WORKING = [
    users.Small,
    users.ReturnsNothingAtTimes,
    users.ReturnsExtras,
    users.ReturnsAMapping,
    users.BackpropagatesByItself,
    users.KeepsTheGraph,
    users.ZeroesInPlace,
    users.AveragesWeights,
    users.MovesATeacher,
    users.FreezesInTheStep,
    users.CallsTheClosureItself,
    users.StepsEverySecondBatch,
    users.WarmsUp,
    users.ClipsByItself,
    users.StopsTheEpoch,
    users.Lbfgs,
    users.StepsWithoutGradients,
    users.StepsTheSchedulerItself,
    users.LogsEverywhere,
]
FAILING = [
    users.ReturnsANumber,
    users.ReturnsNoLoss,
    users.ReturnsAMappingWithoutLoss,
    users.LosesItsGraph,
    users.NeverCallsTheClosure,
    users.ForgetsTheClosure,
    users.LogsWhereNothingIsLogged,
]
OPTIONS = [
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm", "accumulate_grad_batches": 2},
]


class Recorder(L.Callback):
    """Notes what a callback sees of each batch."""

    def __init__(self) -> None:
        self.calls, self.outputs, self.metrics, self.gradients = [], [], [], []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.calls.append("zero_grad")

    def on_after_backward(self, trainer, pl_module):
        self.calls.append("backward")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(kind, strategy, callbacks=(), **options):
    torch.manual_seed(0)
    module, recorder = kind().double(), Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        callbacks=[recorder, *callbacks],
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, module.loader())
    return module, recorder, trainer


def strategy_of(size):
    return "unified" if size == "whole" else UnifiedStrategy(micro_batch_size=SPLIT)


def assert_same(kind, size, callbacks=(), **options):
    plain, plain_saw, plain_trainer = train(kind, "auto", callbacks, **options)
    ours, our_saw, our_trainer = train(kind, strategy_of(size), callbacks, **options)

    exact = {"rtol": 1e-7, "atol": 1e-9} if kind is users.Lbfgs else EXACT  # a line of many steps adds rounding up
    torch.testing.assert_close(weights(ours), weights(plain), **exact)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()), **exact)
    torch.testing.assert_close(our_saw.outputs, plain_saw.outputs, **exact)
    torch.testing.assert_close(our_saw.gradients, plain_saw.gradients, **exact)
    torch.testing.assert_close(ours.seen, plain.seen, **exact)
    assert our_saw.metrics == [pytest.approx(metrics, rel=1e-6) for metrics in plain_saw.metrics]
    assert our_saw.calls == plain_saw.calls and our_trainer.global_step == plain_trainer.global_step
    if size == "split":
        assert our_trainer.strategy.micro_batch_size == SPLIT


@pytest.mark.parametrize("size", [slow("whole"), "split"])
@first_cells(5, "kind", WORKING, ids=lambda kind: kind.__name__)
def test_a_module_that_uses_a_hook_trains_as_under_plain_lightning(kind, size):
    assert_same(kind, size)


@pytest.mark.parametrize("size", [slow("whole"), "split"])
@first_cells(2, "options", OPTIONS[1:], ids=["window", "by value", "by norm"])
@first_cells(
    1, "kind", [users.LogsEverywhere, slow(users.ClipsByItself), slow(users.ZeroesInPlace), users.MovesATeacher]
)
def test_windows_and_clipping_reach_the_hooks_as_under_plain_lightning(kind, options, size):
    assert_same(kind, size, **options)


@pytest.mark.parametrize("size", [slow("whole"), "split"])
def test_what_callbacks_log_in_hooks_is_what_plain_lightning_logs(size):
    assert_same(users.LogsEverywhere, size, callbacks=[users.LogsInACallback()])


@pytest.mark.parametrize("size", ["whole", "split"])
@first_cells(4, "kind", FAILING, ids=lambda kind: kind.__name__)
def test_an_error_of_lightnings_is_raised_as_by_plain_lightning(kind, size):
    with pytest.raises(Exception) as plain:
        train(kind, "auto")
    with pytest.raises(type(plain.value)) as ours:
        train(kind, strategy_of(size))

    assert str(ours.value) == str(plain.value)


def test_a_repeated_step_moves_the_teacher_once(monkeypatch):
    plain, _, _ = train(users.MovesATeacher, "auto")
    # the iterator itself would be put back
    fails = iter(
        [False] * 4 + [True] + [False] * 99
    ).__next__  # memory runs out in the second batch, after one of its micro-batches

    def loss(self, batch):
        if len(batch["x"]) < 8 and self.trainer.training and self.global_step == 1 and fails():
            raise torch.OutOfMemoryError("out of memory")
        return kept(self, batch)

    kept = users.MovesATeacher.loss
    monkeypatch.setattr(users.MovesATeacher, "loss", loss)
    ours, _, trainer = train(users.MovesATeacher, UnifiedStrategy(micro_batch_size=SPLIT))

    assert trainer.strategy.recoveries == 1
    torch.testing.assert_close(weights(ours), weights(plain), **EXACT)
    torch.testing.assert_close(ours.seen, plain.seen, **EXACT)


class KeepsLosses(L.Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        self.last = loss.detach()


def test_a_hook_that_runs_for_each_micro_batch_is_said():
    callbacks = [KeepsLosses()], [L.pytorch.callbacks.LambdaCallback(on_before_backward=lambda *_: None)], []
    events = [train(users.Small, strategy_of("split"), one)[2].strategy.events for one in callbacks]

    assert [any("on_before_backward" in event for event in one) for one in events] == [True, True, False]


class KeepsAll(L.Callback):
    def __init__(self):
        self.losses, self.count = [], 0

    def on_before_backward(self, trainer, pl_module, loss):
        self.losses.append(float(loss))
        self.count += 1


@pytest.mark.parametrize(("rows", "micro_batches"), [(2, 4 + 4 + 2), (4, 2 + 2 + 1)])
def test_what_a_hook_keeps_of_each_micro_batch_stays(rows, micro_batches):
    keeps = KeepsAll()
    trainer = train(users.Small, UnifiedStrategy(micro_batch_size=rows), [keeps])[2]

    assert len(keeps.losses) == keeps.count == micro_batches * (trainer.current_epoch or 1)


class WritesToTheLogger(users.Small):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"rows": len(batch["x"])}, step=self.global_step)
        self.logger.experiment.add_text("rows", str(len(batch["x"])))
        return super().training_step(batch, batch_idx)


class Written(L.pytorch.loggers.logger.DummyLogger):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows += [metrics["rows"]] if "rows" in metrics else []


def test_the_check_writes_nothing_to_loggers_and_names_a_step_that_does():
    logger = Written()
    trainer = train(WritesToTheLogger, strategy_of("split"), logger=logger)[2]

    assert logger.rows == [3, 3, 2, 3, 3, 2, 3] * 2
    assert any("writes to the logger" in event for event in trainer.strategy.events)
    assert trainer.loggers == [logger]


def test_manual_optimization_runs_as_under_plain_lightning():
    assert_same(users.TwoByHand, "whole")


class Calls:
    """Records each hook of a step with its arguments, before and after the module's own."""

    NAMES = (
        "on_train_batch_start",
        "training_step",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
        "on_train_batch_end",
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, self._recorded(name, getattr(self, name)))

    def _recorded(self, name, hook):
        def call(*args, **kwargs):
            self.seen.append((name, *map(summary, args), *((key, summary(value)) for key, value in kwargs.items())))
            result = hook(*args, **kwargs)
            self.seen.append(f"{name} ends")
            return result

        return call


def summary(value):
    """Return what can be compared of an argument: numbers, types, and the batch's rows."""
    if isinstance(value, dict) and "x" in value:
        return f"{len(value['x'])} rows"
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, dict):
        return sorted(value)
    return f"loss {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


class Recorded(Calls, users.Small):
    seen = Lasting()  # kept beside the module: what micro-batches append to its own lists is put together


def unchecked():
    """Split without the exactness check, whose runs of the step would be recorded as well."""
    return UnifiedStrategy(micro_batch_size=SPLIT, check_split=False)


PER_MICRO_BATCH = ("training_step", "on_before_backward", "backward")


def per_batch(calls):
    names = [call if isinstance(call, str) else call[0] for call in calls]
    return [call for call, name in zip(calls, names, strict=True) if name.removesuffix(" ends") not in PER_MICRO_BATCH]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "by value", "by norm"])
def test_hooks_of_a_whole_batch_are_called_in_lightnings_order_with_its_arguments(options):
    plain, _, _ = train(Recorded, "auto", **options)
    ours, _, _ = train(Recorded, "unified", **options)

    closures = [
        tuple("Closure" if part == "MicroBatchClosure" else part for part in call) for call in map(as_tuple, ours.seen)
    ]
    assert closures == list(map(as_tuple, plain.seen))


def as_tuple(call):
    return (call,) if isinstance(call, str) else call


@first_cells(1, "options", OPTIONS, ids=["plain", "window", "by value", "by norm"])
def test_a_split_batch_repeats_step_and_backward_only(options):
    plain, _, _ = train(Recorded, "auto", **options)
    ours, _, _ = train(Recorded, unchecked(), **options)

    def closed(calls):
        return [tuple("Closure" if part == "MicroBatchClosure" else part for part in as_tuple(call)) for call in calls]

    assert closed(per_batch(ours.seen)) == closed(per_batch(plain.seen))
    repeated = [as_tuple(call) for call in ours.seen if as_tuple(call)[0] in PER_MICRO_BATCH]
    expected = []
    for _epoch in range(2):
        for index, sizes in enumerate([(3, 3, 2), (3, 3, 2), (3,)]):
            for rows in sizes:
                expected += [
                    ("training_step", f"{rows} rows", index),
                    ("on_before_backward", "loss ()"),
                    ("backward", "loss ()"),
                ]
    assert repeated == expected


def test_gradients_are_zeroed_once_between_the_last_step_and_its_backward():
    ours, _, _ = train(Recorded, unchecked())
    first = [as_tuple(call)[0] for call in ours.seen]
    first = [name for name in first[: first.index("on_train_batch_end")] if not name.endswith(" ends")]

    step = ["training_step", "on_before_backward", "backward"]
    assert first == [
        "on_train_batch_start",
        "optimizer_step",
        *step,
        *step,
        *("training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward"),
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
    ]
