"""Evaluation checks compare all rows of a batch: a step may compute with a fixed number of rows."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.trials.evaluation_runs import EvaluationRuns
from lightning_unified.step.recovery import measured_room
from lightning_unified.step.recovery.measured_room import MeasuredRoom


class Net(L.LightningModule):
    """Predicts and validates row by row; more than `room` rows do not fit."""

    def __init__(self, room=99):
        super().__init__()
        self.net, self.room = nn.Linear(6, 3), room

    def out(self, batch):
        out = self.net(batch[0])
        if len(out) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return out

    def predict_step(self, batch, batch_idx):
        return self.out(batch)

    def validation_step(self, batch, batch_idx):
        self.keep(F.cross_entropy(self.out(batch), batch[1], reduction="none"), batch_idx)

    def keep(self, losses, batch_idx):
        self.log("loss", losses.mean())


def loader(*batches):
    """Return a loader of batches of the given numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    data = [
        [torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)]
        for rows in batches
    ]
    return DataLoader(data, batch_size=None)


def trainer(strategy, **options):
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", strategy=strategy, **off, **options)


def predicted(module, *batches, micro=5):
    batches = batches or (24, 24)
    return trainer(UnifiedStrategy(evaluation_micro_batch_size=micro)).predict(module, loader(*batches))


def named(module, micro=5):
    """Return the warnings of a validation in micro-batches."""
    strategy = UnifiedStrategy(evaluation_micro_batch_size=micro)
    trainer(strategy).validate(module, loader(24, 24), verbose=False)
    return [event for event in strategy.events if "no rule merges" in event]


@pytest.fixture
def compared(monkeypatch):
    """Note the rows of each comparison, on a budget that is not ample."""
    seen, trials = [], EvaluationRuns.trials

    def noted(self, *args, size, splits, **options):
        seen.append((size, list(splits[0])))
        return trials(self, *args, size=size, splits=splits, **options)

    monkeypatch.setattr(EvaluationRuns, "trials", noted)
    monkeypatch.setattr(measured_room, "NEGLIGIBLE", 1 << 60)
    return seen


@pytest.fixture
def ran(monkeypatch):
    """Note the rows of each run of the step, outside of the state that a check restores."""
    seen, linear = [], nn.Linear.forward

    def noted(self, x):
        seen.append(len(x))
        return linear(self, x)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    return seen


class First(Net):
    def predict_step(self, batch, batch_idx):
        return self.out(batch)[:8]


def test_predictions_of_a_number_of_rows_are_refused():
    with pytest.raises(SplitError, match=r"what First.predict_step returns is not known .* on the number of rows"):
        predicted(First())


def test_a_log_of_a_number_of_rows_is_named():
    class Hardest(Net):
        def keep(self, losses, batch_idx):
            self.log("hard", losses.topk(min(10, len(losses))).values.mean())

    (warning,) = named(Hardest())

    assert warning.startswith("'hard', logged, returned or updated by validation_step, is not")


def test_a_log_that_short_batches_lack_is_named():
    class Skips(Net):
        def keep(self, losses, batch_idx):
            if len(losses) >= 24:
                super().keep(losses, batch_idx)

    assert [event.partition(",")[0] for event in named(Skips())] == ["'loss'"]


class Recurrent(Net):
    hidden = None

    def predict_step(self, batch, batch_idx):
        before = self.hidden if self.hidden is not None and len(self.hidden) == len(batch[0]) else 0
        self.hidden = self.out(batch) + before
        return self.hidden


@pytest.mark.parametrize("batches", [(24, 24), (24, 24, 24, 24), (20, 24, 24)])
def test_predictions_from_the_rows_of_the_batch_before_are_refused(batches):
    with pytest.raises(
        SplitError, match=r"Recurrent writes Recurrent\.hidden .* once a batch: in on_predict_batch_end"
    ):
        predicted(Recurrent(), *batches)


def test_rows_that_a_later_batch_keeps_are_compared():
    class Keeps(Net):
        def keep(self, losses, batch_idx):
            if batch_idx == 1:
                self.kept = losses[:16]

    with pytest.raises(SplitError, match=r"writes Keeps.kept .* once a batch: in on_validation_batch_end"):
        named(Keeps(), micro=12)


def test_rows_of_a_larger_batch_are_compared():
    class Sixteen(Net):
        def predict_step(self, batch, batch_idx):
            return self.out(batch)[:16]

    with pytest.raises(SplitError, match="is not known to be one entry for each row"):
        predicted(Sixteen(), 14, 14, 14, 24)


def test_rows_double_where_each_run_tells_that_the_next_fits(compared):
    predicted(Net(), 24)

    assert [size for size, _ in compared] == [7, 7, 14, 24]
    assert compared[-1][1] == [5, 5, 5, 5, 4]
    with pytest.raises(SplitError):
        predicted(First(), 24)


def test_rows_of_a_micro_batch_run_where_nothing_tells_that_more_fit(compared, monkeypatch):
    monkeypatch.setattr(MeasuredRoom, "fits", lambda *_: False)
    strategy = UnifiedStrategy(evaluation_micro_batch_size=12)
    trainer(strategy).predict(Net(), loader(24))
    (event,) = [event for event in strategy.events if "more are not known to fit" in event]

    assert [size for size, _ in compared] == [8, 12]
    assert event.startswith("checks of predict_step compare 12 rows of a batch, and not all")
    with pytest.raises(SplitError):
        predicted(First(), micro=12)


@pytest.mark.parametrize("kind", [First, Net])
def test_rows_are_halved_where_memory_runs_out(kind, ran):
    module = kind(room=12)
    if kind is First:
        with pytest.raises(SplitError, match=r"what First\.predict_step"):
            predicted(module, micro=6)
    else:
        assert [len(one) for one in predicted(module, micro=6)] == [24, 24]

    assert ran.count(24) == 1


def test_rows_that_are_known_to_fail_are_not_run_again(ran):
    module = Net(room=12)
    trainer("unified").predict(module, loader(24, 24))

    assert [rows for rows in ran if rows > 12] == [24]


def test_memory_that_was_not_measured_leaves_no_room(monkeypatch):
    strategy = UnifiedStrategy()
    trainer(strategy).predict(Net(), loader(8))
    room = MeasuredRoom(strategy.policy.watch, Net(), torch.device("cpu"))

    assert not room.fits(1)
    with room.measuring(8):
        torch.ones(1 << 22)
    assert room.fits(16)
    assert not room.fits(1 << 30)


def hint(value, **options):
    """Return the refusal of a prediction."""
    module = type("Hinted", (Net,), {"predict_step": lambda self, batch, _: value(self.out(batch))})()
    with pytest.raises(SplitError) as refusal:
        trainer(UnifiedStrategy(evaluation_micro_batch_size=5, **options)).predict(module, loader(24))
    return str(refusal.value)


def test_a_refused_prediction_of_rows_that_see_each_other_names_no_rule():
    text = hint(lambda out: out.softmax(0))

    assert "these depend on other rows" in text
    assert "larger evaluation_micro_batch_size or budget, MicroBatchRules(splittable=False)" in text
    assert "concatenate" not in text
    assert "MergeRules" not in text


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist])
def test_a_refused_prediction_of_classes_says_what_rounding_does(kind):
    text = hint(lambda out: kind((out - out.mean(0)).argmax(1)))

    assert "Where rounding alone changes such integers, as classes of rows whose largest values are close" in text


def test_a_refused_prediction_in_16_bits_has_a_hint():
    assert "these depend on other rows" in hint(lambda out: out.bfloat16().softmax(0))


def test_a_refused_prediction_is_given_the_rules_that_fit():
    text = hint(lambda out: {"best": out.max()})

    assert "Of the rules that fit so far, 'max'," in text
    assert "MergeRules(outputs={'best': …})" in text


def test_a_refused_number_without_a_rule_may_be_given_a_function():
    text = hint(lambda out: out.std())

    assert "it is of all rows together" in text
    assert "give a function of the two" in text
    assert "concatenate" not in text


@pytest.mark.parametrize(
    ("value", "says"),
    [(lambda out: out, 'say "concatenate"'), (lambda out: out.mean(), "Return one entry for each row")],
)
def test_a_prediction_that_no_check_has_seen_says_how_to_decide(value, says):
    assert says in hint(value, check_split=False)


def test_an_output_without_a_name_is_called_the_output():
    class Returns(Net):
        def validation_step(self, batch, batch_idx):
            return self.out(batch)[:4]

    (warning,) = named(Returns())

    assert warning.startswith("the output of validation_step is not the whole batch's")
    assert 'MergeRules(outputs={"": ...})' in warning


def test_batches_that_are_not_splittable_run_whole_in_an_evaluation(ran):
    rules = MicroBatchRules(splittable=False)
    trainer(UnifiedStrategy(evaluation_micro_batch_size=5, micro_batches=rules)).predict(Net(), loader(24))

    assert ran == [24]


class Classes(Net):
    """Returns the class of each row, which rounding may change."""

    def predict_step(self, batch, batch_idx):
        return self.out(batch).argmax(1)


@pytest.mark.parametrize("needs_autocast", [False, True])
def test_an_evaluation_with_autocast_is_compared_without_where_it_can(needs_autocast, monkeypatch):
    formats, linear = [], nn.Linear.forward

    def noted(self, x):
        out = linear(self, x)
        formats.append(out.dtype)
        if needs_autocast and out.dtype == torch.float32:
            raise RuntimeError("expected scalar type BFloat16")
        return out

    monkeypatch.setattr(nn.Linear, "forward", noted)
    strategy = UnifiedStrategy(evaluation_micro_batch_size=12)
    out = trainer(strategy, precision="bf16-mixed").predict(Classes(), loader(24))

    assert [len(one) for one in out] == [24]
    checks = formats[:-2]
    assert formats[-2:] == [torch.bfloat16] * 2
    assert set(checks[needs_autocast:]) == {torch.bfloat16 if needs_autocast else torch.float32}
