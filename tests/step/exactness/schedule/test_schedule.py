"""Checks run before split batches 1, 2, 4, 8, …, and before batches of a new kind."""

import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit, weights
from tests.support.modules.split import LateRagged, Net, ShiftedTokens
from tests.support.runs.schedules import batches, found, run


def test_batches_1_2_4_8_and_so_on_are_checked(checks):
    run(Net, batches())

    assert checks.steps == [0, 1, 3, 7, 15, 31]


@pytest.mark.slow
def test_a_batch_is_not_checked_soon_after_one_of_a_new_kind(checks):
    run(
        Net,
        batches(number=16, change=lambda batch, row: {"x": torch.zeros(6).double()} if (batch, row) == (6, 0) else {}),
    )

    assert checks.steps == [0, 1, 3, 6, 15]


@pytest.mark.slow
def test_the_schedule_goes_on_over_epochs(checks):
    run(Net, batches(number=5), max_epochs=4)

    assert checks.steps == [0, 1, 3, 7, 15]


def test_batches_of_a_window_count_one_by_one(checks):
    run(Net, batches(number=16), accumulate_grad_batches=4)

    assert len(checks.steps) == 5


def test_the_first_check_runs_as_many_rows_as_a_micro_batch_and_later_ones_eight(checks):
    run(Net, batches(number=4, size=32), strategy=UnifiedStrategy(micro_batch_size=16, predict=False))

    assert checks.rows == [[16, 8], [8], [8]]


def test_the_first_check_runs_32_units_where_they_are_predicted_to_fit(checks):
    run(Net, batches(number=2, size=64), strategy=UnifiedStrategy(micro_batch_size=4))

    assert checks.rows == [[32, 8], [8]]


def test_a_loss_that_mixes_rows_from_sixteen_on_is_refused():
    class Many(Net):
        def loss(self, out, batch):
            return super().loss(out, batch) + (out.mean() ** 2 if len(out) >= 16 else 0.0)

    with pytest.raises(SplitError, match="Many cannot be split exactly: the gradient of 16 rows"):
        run(Many, batches(number=2, size=16), strategy=UnifiedStrategy(micro_batch_size=4))


class Hardest(Net):
    def loss(self, out, batch):
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        return losses.topk(min(32, len(losses))).values.mean()


class First(Net):
    def loss(self, out, batch):
        return super().loss(out[:32], {"y": batch["y"][:32]})


class Full(Net):
    def loss(self, out, batch):
        return super().loss(out, batch) + (torch.cdist(out, out).mean() if len(out) >= 64 else 0.0)


@pytest.mark.parametrize("kind", [Hardest, First, Full])
def test_a_loss_that_differs_only_for_all_rows_of_the_batch_is_refused(kind):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly: the loss of a batch of 64 rows"):
        run(kind, batches(number=2, size=64), strategy=UnifiedStrategy(micro_batch_size=16))


class Differentiates(Net):
    """Computes a gradient in its step, which fails without gradients."""

    def loss(self, out, batch):
        loss = super().loss(out, batch)
        (gradient,) = torch.autograd.grad(loss, out, retain_graph=True)
        return loss + (out * gradient.sign()).mean()


def test_the_loss_of_all_rows_is_left_out_for_a_step_that_needs_gradients():
    plain, _ = run(Differentiates, batches(number=2, size=64), strategy="auto")
    split, _ = run(Differentiates, batches(number=2, size=64), strategy=UnifiedStrategy(micro_batch_size=16))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)


def test_the_first_check_runs_eight_units_where_micro_batches_are_smaller(checks):
    class Units(Net):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(unit=2)

    run(Units, batches(number=2, size=32), strategy=UnifiedStrategy(micro_batch_size=4, predict=False))

    assert checks.rows == [[16, 16], [16]]
    assert checks.splits[0] == [[4, 6, 6], [4, 4, 8]]


def test_the_first_check_splits_in_two_ways_and_later_ones_take_turns(checks):
    run(Net, batches(number=8))

    one, other = [2, 3, 3], [2, 2, 4]
    assert checks.splits == [[one, other], [other], [one], [other]]


class Squeezed(Net):
    """Drops the dimension of a single row, and keeps its outputs."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])[:, :1].squeeze()
        self.kept.append(out.detach())
        return F.mse_loss(out, batch["y"].to(out))

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])[:, :1].squeeze()


def test_no_single_row_runs_in_a_check_unless_it_does_in_training(checks):
    module, _ = run(Squeezed, batches(number=3), strategy=UnifiedStrategy(micro_batch_size=3))

    assert [len(out) for out in module.kept] == [8, 8, 8]
    assert min(rows for check in checks.splits for split in check for rows in split) == 2
    with pytest.raises(SplitError, match=r"writes Squeezed\.kept"):
        run(Squeezed, batches(number=3), strategy=UnifiedStrategy(micro_batch_size=1))


class Paired(Net):
    """Fails on a single row, as a step that drops its dimension and counts the others."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])[:, :1].squeeze()
        return F.mse_loss(out, batch["y"].to(out)) + 0.0 * out.shape[0]


class Centred(Paired):
    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "x": batch["x"] - batch["x"].mean(0)}, batch_idx)


@pytest.mark.parametrize("rows", [4, 5, 6])
def test_a_short_batch_whose_step_fails_on_a_single_row_is_checked_as_it_is_split(rows, checks):
    data = batches(number=6).dataset
    loader = [range(8), range(8, 8 + rows)]
    plain, split = (
        run(Paired, DataLoader(data, batch_sampler=loader), strategy=strategy)[0]
        for strategy in ("auto", UnifiedStrategy(micro_batch_size=3))
    )

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-12)
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(Centred, DataLoader(data, batch_sampler=loader[1:]), strategy=UnifiedStrategy(micro_batch_size=3))


def test_the_first_micro_batch_of_one_row_is_checked(checks):
    data = batches(number=6).dataset
    ends = [0, 8, 16, 24, 32, 40, 43]  # micro-batches of two rows, and at last of two and one

    run(
        Net,
        DataLoader(data, batch_sampler=[range(*pair) for pair in itertools.pairwise(ends)]),
        strategy=UnifiedStrategy(micro_batch_size=2),
    )

    assert checks.steps == [0, 1, 3, 5]
    assert [min(split) for check in checks.splits for split in check] == [2, 2, 2, 2, 1]


def test_predictions_without_a_dimension_of_a_single_row_are_the_whole_batchs():
    trainer = L.Trainer(accelerator="cpu", strategy=UnifiedStrategy(evaluation_micro_batch_size=3), logger=False)

    assert [len(out) for out in trainer.predict(Squeezed().double(), batches(number=2))] == [8, 8]


def test_whole_batches_are_not_checked(checks):
    run(Net, batches(number=3), strategy=UnifiedStrategy())

    assert checks.steps == []


@pytest.mark.parametrize(
    "rules",
    [UnifiedStrategy(micro_batch_size=3, check_split=False), MicroBatchRules(check=False)],
    ids=["option", "rule"],
)
def test_nothing_is_checked_where_that_was_asked_for(rules, checks):
    strategy = UnifiedStrategy(micro_batch_size=3, micro_batches=rules) if isinstance(rules, MicroBatchRules) else rules
    run(Net, batches(number=3), strategy=strategy)

    assert checks.steps == []


NEW = {
    "a new label": lambda batch, row: {"y": 5 if (batch, row) == (5, 4) else row % 4},
    "a row without observations": lambda batch, row: {"z": torch.ones(4) * ((batch, row) != (5, 4))},
    "a missing value": lambda batch, row: {"z": torch.tensor([1.0, 1.0 if (batch, row) != (5, 4) else float("nan")])},
    "longer rows": lambda batch, row: {"z": torch.ones(4 if batch < 5 else 9)},
    "another tensor": lambda batch, row: {"z": torch.ones(4)} if batch >= 5 else {},
}


class SixClasses(Net):
    def loss(self, out, batch):
        return F.cross_entropy(torch.cat([out, out], 1), batch["y"])


@first_cells(2, "name", NEW)
def test_a_batch_of_a_new_kind_is_checked_before_its_update(name, checks):
    run(SixClasses, batches(number=8, change=NEW[name]))

    assert checks.steps == [0, 1, 3, 5, 7]


@first_cells(1, "value", [float("nan"), -5.0])
@first_cells(1, "late", [0, 3])
def test_a_field_that_is_no_weight_after_all_is_none(value, late, checks):
    """Ones may be weights; a later missing or negative number shows that they are not."""
    change = {"z": torch.ones(()), "late": torch.tensor(value)}
    _, trainer = run(
        Net, batches(number=8, change=lambda batch, row: {"z": change["late" if (batch, row) == (late, 4) else "z"]})
    )

    assert found(trainer).startswith("rows: ")


def test_a_kind_of_batch_is_new_once(checks):
    run(SixClasses, batches(number=8, change=lambda batch, row: {"y": 5 if batch > 4 else row % 4}))

    assert checks.steps == [0, 1, 3, 5, 7]


class Warmed(Net):
    """Reads the step: a term is switched on later."""

    def loss(self, out, batch):
        loss = super().loss(out, batch)
        return loss + out.std() if self.global_step >= 5 else loss


class Scaled(Net):
    """Scales rows as DeepAR does: a row without observations is scaled by the batch's mean."""

    def training_step(self, batch, batch_idx):
        sizes = batch["z"].abs().mean(1)
        scale = torch.where(sizes > 0, sizes, sizes[sizes > 0].mean())
        return F.cross_entropy(self.net(batch["x"]) * scale[:, None], batch["y"])


def without_observations(batch, row):
    return {"z": (1.0 + row) * torch.ones(4, dtype=torch.float64) * ((batch, row) != (5, 4))}


LATE = {"Scaled": (Scaled, without_observations), "Warmed": (Warmed, lambda batch, row: {})}


@first_cells(1, "name", LATE)
def test_a_batch_that_mixes_rows_is_refused_before_its_update(name):
    kind, change = LATE[name]
    plain, _ = run(kind, batches(change=change), strategy="auto", max_steps=5)
    torch.manual_seed(0)
    module = kind().double()

    with pytest.raises(SplitError, match=f"{name} cannot be split exactly"):
        fit(module, batches(change=change), strategy=UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-10, atol=1e-12)


class Sly(Net):
    """Mixes rows once its gradients have moved it far enough: no batch shows that."""

    def loss(self, out, batch):
        loss = super().loss(out, batch)
        return loss + out.std() if Sly.steps >= 6 else loss

    def on_train_batch_end(self, *_):
        Sly.steps += 1


@first_cells(1, "kept", [1, 0])
def test_a_checkpoint_that_is_gone_is_not_named(kept, tmp_path):
    Sly.steps = 0
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=kept)

    with pytest.raises(SplitError, match="no checkpoint from before it is left"):
        fit_with_checkpoints(Sly().double(), checkpoint)


def test_a_late_refusal_names_the_first_suspect_step_and_the_last_checkpoint(tmp_path):
    Sly.steps = 0
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")

    with pytest.raises(SplitError) as error:
        fit_with_checkpoints(Sly().double(), checkpoint)

    assert "Batches up to step 3 agreed; the first that may have been updated inexactly is step 4" in str(error.value)
    assert f"the last checkpoint before it is {tmp_path / 'step=2.ckpt'}." in str(error.value)


def fit_with_checkpoints(module, checkpoint):
    L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(micro_batch_size=3),
        precision="64-true",
        max_epochs=1,
        callbacks=[] if checkpoint is None else [checkpoint],
        logger=False,
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, batches())


def test_a_late_refusal_without_a_checkpoint_says_so():
    Sly.steps = 0

    with pytest.raises(SplitError, match=r"updated inexactly is step 4; no checkpoint from before it is left\."):
        fit_with_checkpoints(Sly().double(), None)


def test_a_first_refusal_says_nothing_of_earlier_steps():
    class Contrasts(Net):
        def loss(self, out, batch):
            return out.std()

    with pytest.raises(SplitError) as error:
        run(Contrasts, batches(number=2))

    assert "step" not in str(error.value)


def test_rules_that_agree_at_first_are_told_apart_by_a_later_batch():
    _, first = run(LateRagged, LateRagged.loader(), limit_train_batches=1)
    _, later = run(LateRagged, LateRagged.loader())

    assert found(first).startswith("rows: ")
    assert found(later).startswith("scored labels, shifted: ")


def masks(*, ragged):
    return lambda batch, row: {"mask": (torch.arange(4) < (1 + row % 4 if ragged(batch) else 4)).double()}


class Masked(Net):
    def training_step(self, batch, batch_idx):
        terms = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")[:, None] * batch["mask"]
        return terms.sum() / batch["mask"].sum()


@first_cells(1, "late", [1, 2, 5, 6])
def test_a_batch_that_tells_rules_apart_is_checked_before_its_update(late, checks):
    change = masks(ragged=lambda batch: batch == late)
    plain, _ = run(Masked, batches(change=change, number=late + 1), strategy="auto")
    module, trainer = run(Masked, batches(change=change, number=late + 1))

    assert checks.steps[-1] == late
    assert found(trainer).startswith("sum of 'mask': ")
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-10, atol=1e-12)


def test_a_rule_that_was_refuted_is_not_tried_again():
    """Its first batch is ragged, its later ones are not.

    Rows agree there too, and masks stay the rule.
    """
    _, trainer = run(Masked, batches(change=masks(ragged=lambda batch: batch == 0), number=8))

    assert found(trainer).startswith("sum of 'mask': ")


def test_a_declared_weight_is_checked_as_often(checks):
    class Declared(ShiftedTokens):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum())

    _, trainer = run(Declared, Declared.loader())

    assert {0, 1} <= set(checks.steps)
    assert found(trainer).startswith("loss_weight: ")
