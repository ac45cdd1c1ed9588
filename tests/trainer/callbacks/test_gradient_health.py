"""Bad gradients are counted by step and named by parameter.

Too many in a row end the run.
"""

import math

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_unified.callbacks import GradientHealth, gradient_health
from lightning_unified.callbacks.gradient_health import _Watch, _witnesses
from lightning_unified.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.filterwarnings("ignore")


class Spoilt(LightningModule):
    """One of two gradient elements of `b.weight` is `values[step]`, if listed.

    The weights stay finite.
    """

    def __init__(self, values):
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
        self.values = values

    def training_step(self, batch, batch_idx):
        return self.b(self.a(batch)).sum()

    def on_after_backward(self):
        value = self.values.get(self.global_step + 1)
        if value is not None:
            self.b.weight.grad[:, 1] = value

    def on_before_optimizer_step(self, optimizer):
        self.b.weight.grad.nan_to_num_(0, 0, 0)  # after the callbacks: one bad step must not spoil the next

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Log:
    """A logger that keeps what it is given."""

    def __new__(cls):
        from lightning.pytorch.loggers.logger import DummyLogger

        logger = DummyLogger()
        logger.rows = []
        logger.log_metrics = lambda metrics, step=None: logger.rows.append(dict(metrics))
        return logger


def train(small_run, folder, health, values, *, steps=10, **options):
    _, trainer = small_run.build(folder, callbacks=[health], max_steps=steps, **options)
    trainer.fit(Spoilt(values), DataLoader(torch.ones(steps, 2), batch_size=1))
    return trainer


def step_with(gradients):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros_like(g)) for g in gradients])
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient
    return optimizer


def test_good_gradients_are_not_counted(small_run, tmp_path):
    health = GradientHealth(check_every=3)
    train(small_run, tmp_path, health, {})

    assert health.nonfinite_steps == 0


def test_bad_steps_are_counted_once_each(small_run, tmp_path):
    health = GradientHealth(check_every=3)
    train(small_run, tmp_path, health, {2: math.nan, 4: math.inf, 5: -math.inf, 10: math.nan})

    assert (health.nonfinite_steps, health.nan_steps, health.inf_steps) == (4, 2, 2)


def test_the_count_is_logged_at_each_reading_with_elements_of_a_bad_step(small_run, tmp_path):
    log = Log()
    values = {2: math.nan, 3: math.inf, 4: math.nan}
    train(small_run, tmp_path, GradientHealth(check_every=3), values, steps=6, logger=log)
    rows = [row for row in log.rows if "gradients/nonfinite_steps" in row]

    assert [row["gradients/nonfinite_steps"] for row in rows] == [2, 3, 3]
    assert (rows[0]["gradients/nan_elements"], rows[0]["gradients/inf_elements"]) == (0, 1)
    assert "gradients/nan_elements" not in rows[1]


def test_a_row_of_bad_steps_ends_the_run_with_where_and_what(small_run, tmp_path):
    values = dict.fromkeys(range(3, 7), math.nan)
    with pytest.raises(
        GradientError,
        match=r"(?s)in 4 optimizer steps in a row, 3 to 6; .*At step 3 first in: b\.weight \(NaN\)\. "
        r"Now: b\.weight 1 NaN and 0 Inf of 2 elements\..*checkpoint written before step 3",
    ):
        train(small_run, tmp_path, GradientHealth(patience=4, check_every=6), values)


def test_one_less_in_a_row_does_not(small_run, tmp_path):
    values = {**dict.fromkeys(range(3, 6), math.nan), **dict.fromkeys(range(7, 10), math.nan)}
    health = GradientHealth(patience=4, check_every=5)
    trainer = train(small_run, tmp_path, health, values)

    assert (trainer.global_step, health.nonfinite_steps) == (10, 6)


def test_a_row_that_is_over_when_it_is_read_is_still_found(small_run, tmp_path):
    values = dict.fromkeys(range(2, 5), math.inf)
    with pytest.raises(GradientError, match=r"3 optimizer steps in a row, 2 to 4.*b\.weight \(Inf\)"):
        train(small_run, tmp_path, GradientHealth(patience=3, check_every=8), values)


def test_a_row_across_a_reading_is_one_row(small_run, tmp_path):
    values = dict.fromkeys(range(3, 7), math.nan)
    with pytest.raises(GradientError, match="4 optimizer steps in a row, 3 to 6"):
        train(small_run, tmp_path, GradientHealth(patience=4, check_every=4), values)


def test_a_row_at_the_end_of_the_run_is_found(small_run, tmp_path):
    values = dict.fromkeys(range(8, 11), math.nan)
    with pytest.raises(GradientError, match="3 optimizer steps in a row, 8 to 10"):
        train(small_run, tmp_path, GradientHealth(patience=3), values)


def test_a_step_done_again_counts_as_it_ended():
    watch = _Watch(50)
    watch.note(1, step_with([torch.tensor([math.nan])]))
    watch.note(1, step_with([torch.tensor([math.nan])]))
    assert watch.history().counts == (1, 1, 0)

    watch.note(1, step_with([torch.tensor([1.0])]))

    assert watch.history().counts == (0, 0, 0)
    watch.note(2, step_with([torch.tensor([math.inf])]))
    assert watch.history().counts == watch.history().counts == (1, 0, 1)


def test_the_device_is_not_waited_for_between_readings(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(gradient_health, "_sums", gradient_health._norms)  # what other devices than a CPU do
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(1), tolist(self))[1])
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("waited"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("waited"))
    watch = _Watch(50)
    for step in range(50):
        watch.note(step, step_with([torch.ones(3), torch.ones(2)]))

    assert reads == []
    watch.history()
    assert reads == [1]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_no_finite_gradient_is_taken_for_inf(dtype):
    largest = torch.finfo(dtype).max / 2
    values = _witnesses([torch.full((100,), largest, dtype=dtype)])

    assert values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_beside_inf_is_nan_and_inf_alone_is_inf(dtype):
    both = torch.tensor([1, math.inf, math.nan, 2], dtype=dtype)
    one = torch.tensor([1, -math.inf], dtype=dtype)
    values = _witnesses([both, one, torch.ones(2, dtype=dtype)])

    assert [math.isnan(values[0]), math.isinf(values[1]), math.isfinite(values[2])] == [True, True, True]


def test_gradients_of_several_dtypes_stay_in_order():
    gradients = [torch.tensor([4.0], dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64, torch.float16)]
    gradients = [g * (i + 1) for i, g in enumerate(gradients)]

    assert _witnesses(gradients).tolist() == [4, 8, 12, 16]


def test_sparse_empty_and_missing_gradients_are_understood():
    embedding = nn.Embedding(5, 2, sparse=True)
    (embedding(torch.tensor([1, 1])).sum() * math.nan).backward()
    optimizer = torch.optim.SGD([embedding.weight, nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0]["params"][1].grad = torch.zeros(0)
    watch = _Watch(3)
    watch.note(1, optimizer)

    assert watch.history().counts == (1, 1, 0)
    watch.note(2, step_with([torch.zeros(0)]))
    assert watch.history().counts == (1, 1, 0)


def test_steps_beyond_the_capacity_are_read_early_and_not_lost():
    watch = _Watch(2)
    for step in range(9):
        watch.note(step, step_with([torch.tensor([math.nan])]))

    assert watch.history().longest.length == 9


def test_the_count_goes_on_after_a_resume(small_run, tmp_path):
    first = GradientHealth()
    train(small_run, tmp_path, first, {2: math.nan}, steps=4)
    second = GradientHealth()
    second.setup(None, None, "fit")
    second.load_state_dict(first.state_dict())

    assert second.state_dict() == {"nonfinite_steps": 1, "nan_steps": 1, "inf_steps": 0}


class Scaler:
    """Stands for `torch.amp.GradScaler`: what `GradientHealth` asks of one."""

    def __init__(self, scale):
        self.scale = scale

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.scale


def with_scaler(trainer, scale):
    trainer.precision_plugin.scaler = Scaler(scale)
    return trainer


def test_with_a_scaler_more_skipped_steps_in_a_row_are_allowed(small_run, tmp_path):
    values = dict.fromkeys(range(1, 9), math.inf)
    for patience, error in ((9, None), (8, "the gradient scaler skipped these steps")):
        health = GradientHealth(patience=2, scaler_patience=patience)
        _, trainer = small_run.build(tmp_path, callbacks=[health], max_steps=10)
        with_scaler(trainer, 2.0)
        if error is None:
            trainer.fit(Spoilt(values), DataLoader(torch.ones(10, 2), batch_size=1))
            assert trainer.global_step == 10
        else:
            with pytest.raises(GradientError, match=error):
                trainer.fit(Spoilt(values), DataLoader(torch.ones(10, 2), batch_size=1))


@pytest.mark.parametrize(("scale", "warns"), [(0.5, 1), (1.0, 0)])
def test_a_scale_below_one_is_warned_about_once(small_run, tmp_path, recwarn, scale, warns):
    _, trainer = small_run.build(tmp_path, callbacks=[GradientHealth(check_every=2)], max_steps=6)
    with_scaler(trainer, scale)
    trainer.fit(Spoilt({}), DataLoader(torch.ones(6, 2), batch_size=1))

    assert sum("the gradient scale has fallen to" in str(w.message) for w in recwarn) == warns


@pytest.mark.parametrize("name", ["patience", "scaler_patience", "check_every"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name}=0: give a whole number, 1 or more"):
        GradientHealth(**{name: 0})
