"""After a change of size, a micro-batch's gradient is compared with the CPU's.

Here the CPU stands for the device.
"""

import dataclasses

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import UnifiedStrategy
from lightning_unified.hardware import Figure
from lightning_unified.step import device_gradients as parity
from lightning_unified.step.exactness.trials import host
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import MLP, RaggedTokens, fit, weights
from tests.support.modules.split import ByItsOwnMode

ISSUE = "pytorch issue 177116"


@pytest.fixture
def as_mps(monkeypatch):
    """Look at this CPU as if it were an MPS device; return the distances found."""
    found = []
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # of a whole test session: that is what would take the time
    monkeypatch.setattr(host, "_WRONG_AT_TIMES", ("cpu",))
    distance = parity.DeviceGradientCheck._compared

    def noted(self, kwargs, rows, *, of):
        found.append((rows, distance(self, kwargs, rows, of=of)))
        return found[-1][1]

    monkeypatch.setattr(parity.DeviceGradientCheck, "_compared", noted)
    return found


class _WrongWhenLarge(torch.autograd.Function):
    """Right in the forward pass and for few rows.

    The backward pass of four and more rows is a thousand times too large.
    """

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1000 if len(gradient) >= 4 else 1)


class OnItsDevice(MLP):
    """Knows whether its weights are its own, or the copies of the CPU's reference."""

    def on_train_start(self):
        object.__setattr__(self, "weight", self.net[0].weight)

    @property
    def is_on_device(self):
        return self.net[0].weight is self.weight


class Faulty(OnItsDevice):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch["x"])
        logits = self.net[1:](_WrongWhenLarge.apply(hidden) if self.is_on_device else hidden)
        return nn.functional.cross_entropy(logits, batch["y"])


class Recurrent(L.LightningModule):
    """Keeps a list of its weights besides; ties others; has a buffer and a counter of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.norm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        hidden = self.norm(self.lstm(self.embed(batch["tokens"]))[0].transpose(1, 2)).transpose(1, 2)
        assert hidden.device == self.device
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    loader = staticmethod(RaggedTokens.loader)


def train(kind, *args, precision="32-true", callbacks=(), **strategy):
    torch.manual_seed(0)
    module = kind(*args)
    options = {"micro_batch_size": 4, "batch_norm": "micro", **strategy}
    loader = module.loader(dtype=torch.float32) if issubclass(kind, MLP) else module.loader()
    _, trainer = fit(
        module, loader, strategy=UnifiedStrategy(**options), precision=precision, callbacks=list(callbacks)
    )
    return module, trainer


class Sizes(L.Callback):
    """Sets the size of each batch of 8, 8 and 6 rows."""

    def __init__(self, *limits):
        self.limits = iter(limits)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.sizes.max_micro_batch_size = next(self.limits, None)


def lacks_bfloat16_lstm():
    """Whether oneDNN has no such layer for this processor: one without AVX-512."""
    layer = torch.nn.LSTM(4, 4, batch_first=True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(3, 5, 4))
    except RuntimeError:
        return True
    return False


@first_cells(
    1,
    ("kind", "precision"),
    crossed(
        [MLP, RaggedTokens, Recurrent],
        ["32-true", "bf16-mixed", "bf16-true"],
        fast=[(MLP, "32-true"), (RaggedTokens, "bf16-mixed"), (Recurrent, "bf16-true")],
    ),
)
def test_a_sound_device_agrees_with_the_cpu(as_mps, kind, precision, caplog):
    if kind is Recurrent and precision == "bf16-mixed" and lacks_bfloat16_lstm():
        pytest.skip("this processor has no LSTM in bfloat16")
    train(kind, precision=precision)

    assert [rows for rows, _ in as_mps] == [4, 3]
    assert all(distance < (1e-5 if precision == "32-true" else 0.05) for _, distance in as_mps), as_mps
    assert ISSUE not in caplog.text


def test_a_run_that_is_compared_equals_one_that_is_not_bit_for_bit(as_mps):
    compared, _ = train(MLP, 0.3)
    state = torch.get_rng_state()
    plain, _ = train(MLP, 0.3, check_split=False)

    assert [type(distance) for _, distance in as_mps] == [float, float]
    assert torch.equal(weights(compared), weights(plain))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(compared.accuracy.tp, plain.accuracy.tp)


def test_a_wrong_gradient_is_named_with_issue_and_remedy_and_the_run_goes_on(as_mps, caplog):
    _, trainer = train(Faulty)

    assert trainer.global_step == 6
    assert [rows for rows, distance in as_mps if distance > 100] == [4]
    text = next(record.getMessage() for record in caplog.records if ISSUE in record.getMessage())
    assert "micro-batch of 4 rows on cpu differs from the CPU's by" in text
    assert "memory.micro_batch_size" in text
    assert any(event.startswith("gradients of 4 rows on cpu differ") for event in trainer.strategy.events)


def test_each_new_size_is_compared_once(as_mps):
    train(MLP, callbacks=[Sizes(4, 4, 4, 2, 2, 4)])

    assert [rows for rows, _ in as_mps] == [4, 3, 2]


def test_whole_batches_are_compared_only_after_a_batch_was_split(as_mps):
    train(MLP, micro_batch_size="auto", callbacks=[Sizes(None, None, None, 4, None, None)])

    assert [rows for rows, _ in as_mps] == [4, 8, 6]


@pytest.mark.slow
def test_other_devices_are_not_compared(monkeypatch):
    monkeypatch.setattr(parity.DeviceGradientCheck, "_compared", lambda *_, **__: pytest.fail("compared"))

    assert train(MLP)[1].global_step == 6


def test_it_is_switched_off_with_the_check_before_the_first_split(as_mps):
    train(MLP, check_split=False)

    assert as_mps == []


def excuses(trainer):
    return [event for event in trainer.strategy.events if "are not compared with the CPU's" in event]


class Noise(MLP):
    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "x": batch["x"] + torch.randn_like(batch["x"])}, batch_idx)["loss"]


class Still(MLP):
    """Has no gradient at all, so that no check tells how its batches are split."""

    def training_step(self, batch, batch_idx):
        return 0.0 * super().training_step(batch, batch_idx)["loss"]


class NeedsItsDevice(OnItsDevice):
    """Fails with weights other than its own, as kernels written for one device do."""

    def training_step(self, batch, batch_idx):
        if not self.is_on_device:
            raise TypeError("this kernel runs on its own device only")
        return super().training_step(batch, batch_idx)


class HoldsWeights(MLP):
    """Computes with its weights by a list of its own, which copies do not reach."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "layers"):
            object.__setattr__(self, "layers", [self.net[0].weight, self.net[0].bias])
        hidden = nn.functional.linear(batch["x"], *self.layers).tanh()
        return nn.functional.cross_entropy(self.net[3](hidden), batch["y"])


@first_cells(
    1,
    ("kind", "text"),
    [
        (Noise, "its step draws random numbers"),
        (Still, "its batches are not known to split exactly"),
        (NeedsItsDevice, "the step fails there (TypeError: this kernel runs on its own device only)"),
        (HoldsWeights, "it holds on to its weights"),
    ],
)
def test_what_cannot_be_compared_is_said_once_and_the_run_goes_on(as_mps, kind, text):
    _, trainer = train(kind)

    assert trainer.global_step == 6
    assert len(excuses(trainer)) == 1
    assert text in excuses(trainer)[0]


@pytest.mark.slow
def test_noise_that_the_cpu_makes_anew_in_each_run_is_no_fault(as_mps):
    class Draws(OnItsDevice):
        """Counts on in the CPU's runs only."""

        draws = 0

        def training_step(self, batch, batch_idx):
            if not self.is_on_device:
                Draws.draws += 1
            return super().training_step({**batch, "x": batch["x"] + Draws.draws}, batch_idx)["loss"]

    _, trainer = train(Draws, precision="bf16-mixed")

    assert "draws random numbers" in excuses(trainer)[0]


@pytest.mark.slow
def test_dropout_by_a_module_s_own_mode_is_off_while_gradients_are_compared(as_mps):
    class Drops(MLP):
        def __init__(self):
            super().__init__()
            self.net.insert(2, ByItsOwnMode())

    train(Drops)

    assert [type(distance) for _, distance in as_mps] == [float, float]


@pytest.mark.slow
def test_copies_that_do_not_fit_are_not_made(as_mps, monkeypatch):
    reading = BudgetWatch.reading
    monkeypatch.setattr(
        BudgetWatch, "reading", lambda watch: dataclasses.replace(reading(watch), available=Figure(64, "a test"))
    )
    _, trainer = train(MLP, budget="4GiB")

    assert "copies of the weights need" in excuses(trainer)[0]
