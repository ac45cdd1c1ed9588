"""Batches of unusual structure are split between samples; an unsplit module runs whole."""

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from tests.support.modules.plain import MLP, RaggedTokens, Rows, fit
from tests.support.runs.split_and_whole import run, same_cut_and_whole


def boxes(count: int):
    return {"boxes": torch.full((count, 4), float(count), dtype=torch.float64)}


@pytest.mark.parametrize("stacked", [True, False])
def test_detection_batches_are_split_between_samples(stacked):
    """The number of boxes or channels is no batch dimension.

    A sample has as many boxes as the batch has rows, and images have three channels.
    """
    rows = [
        (torch.full((3, 4, 4), float(row), dtype=torch.float64), boxes(count))
        for row, count in enumerate([1, 8, 3, 2, 5, 8, 1, 4])
    ]

    class Detects(MLP):
        parts = set()

        def training_step(self, batch, batch_idx):
            images, targets = batch
            self.parts.add((len(images), len(targets)))
            terms = [
                (self.net[0](image.mean() * torch.ones(6).double()) - target["boxes"].sum()).pow(2).mean()
                for image, target in zip(images, targets, strict=True)
            ]
            return sum(terms) / len(terms)

    def collate(samples):
        images, targets = zip(*samples, strict=True)
        return (torch.stack(images), list(targets)) if stacked else (list(images), list(targets))

    loader = DataLoader(Rows(rows), batch_size=8, collate_fn=collate)
    same_cut_and_whole(Detects, loader=lambda: loader, check_split=False)
    assert Detects.parts == {(8, 8), (3, 3), (2, 2)}


def test_a_shared_tensor_that_comes_first_is_not_taken_for_the_batch():
    class Weighs(MLP):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
            return (losses * batch["class_weights"][batch["y"]]).mean()

    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return {"class_weights": torch.linspace(0.5, 1.5, 4, dtype=torch.float64), **batch}

    same_cut_and_whole(Weighs, loader=lambda: DataLoader(MLP.loader().dataset, batch_size=8, collate_fn=collate))


def test_a_second_module_under_the_same_trainer_is_split_by_its_own_rules():
    class Pairs(MLP):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(unit=2)

    torch.manual_seed(0)
    first, second = RaggedTokens().double(), Pairs().double()
    strategy = UnifiedStrategy(micro_batch_size=3, check_split=False)
    _, trainer = fit(first, first.loader(rows=16), strategy=strategy)
    rows = set()
    second.net.register_forward_hook(lambda _, inputs, __: rows.add(len(inputs[0])))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(second, second.loader(rows=6, batch_size=6))

    assert rows == {2}
    assert strategy.effective_batch_size == 6


def test_a_size_below_the_modules_unit_is_refused():
    class Pairs(MLP):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(unit=4)

    with pytest.raises(
        ConfigurationError, match="micro_batch_size=3 is less than the 4 rows that Pairs keeps together"
    ):
        run(Pairs, UnifiedStrategy(micro_batch_size=3))


def test_a_batch_of_unknown_rows_runs_whole_in_a_module_that_is_not_split():
    class Whole(L.LightningModule):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(splittable=False)

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch, batch_idx):
            return self.weight * batch["scale"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = DataLoader(Rows([{"scale": 2.0}] * 3), batch_size=None)
    _, _, trainer = run(Whole, UnifiedStrategy(micro_batch_size=3), lambda: loader)

    assert trainer.global_step == 6


def test_a_size_found_by_recovery_does_not_refuse_a_module_with_larger_units():
    strategy = UnifiedStrategy(micro_batches=MicroBatchRules(unit=4))
    strategy.sizes.max_micro_batch_size = 2
    torch.manual_seed(0)
    module = MLP().double()
    fit(module, module.loader(rows=16), strategy=strategy)

    assert strategy.micro_batch_size == 4


def test_a_batch_without_any_row_runs_whole():
    """Filters in a collate function may leave none."""

    class Filtered(MLP):
        def training_step(self, batch, batch_idx):
            rows = len(batch["x"])
            return super().training_step(batch, batch_idx) if rows else {"loss": self.net(batch["x"]).sum()}

    def loader():
        rows = MLP.loader().dataset
        batches = [range(8), range(8, 13), range(0), range(13, 22)]
        collate = torch.utils.data.default_collate
        empty = {name: value[:0] for name, value in collate([rows[0]]).items()}
        return DataLoader(rows, batch_sampler=batches, collate_fn=lambda some: collate(some) if some else empty)

    same_cut_and_whole(Filtered, loader=loader)
