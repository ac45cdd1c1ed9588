"""A mean over entries that are not padding is split.

Neither the padding number nor the order of padded batches matters.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import Rows, fit, weights
from tests.support.modules.step_kinds import Kind

BATCHES, ROWS, LENGTH, TOKENS = 9, 8, 7, 300


class Padded(Kind):
    """Leaves out one number among its targets; some batches have none of it."""

    pad, name, without = 0, "targets", ()

    def make_net(self):
        return nn.Sequential(nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS))

    def loss(self, batch):
        logits = self.net(batch["ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch[self.name].flatten(), ignore_index=self.pad)

    @classmethod
    def loader(cls):
        generator, rows = torch.Generator().manual_seed(0), []
        for row in range(BATCHES * ROWS):
            ids = torch.randint(3, 256, (LENGTH,), generator=generator)
            scored = LENGTH if row // ROWS in cls.without else 2 + row % 4
            rows.append({"ids": ids, cls.name: cls.padded(ids, scored)})
        return DataLoader(Rows(rows), batch_size=ROWS)

    @classmethod
    def padded(cls, ids, scored):
        return ids.masked_fill(torch.arange(LENGTH) >= scored, cls.pad)


class PaddedOnTheLeft(Padded):
    pad = 1

    @classmethod
    def padded(cls, ids, scored):
        return super().padded(ids, scored).flip(0)


def fitted(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    _, trainer = fit(module, kind.loader(), strategy=strategy, max_epochs=1)
    return module, trainer


def assert_same(kind):
    plain, _ = fitted(kind)
    ours, trainer = fitted(kind, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-9, atol=1e-11)
    reason = trainer.strategy.plan.reasons["loss_weight"]
    assert reason.startswith(f"entries of '{kind.name}' other than {kind.pad}: gradients of")


@first_cells(
    1,
    ("pad", "without"),
    crossed(
        [0, 1, 299],
        [(), (0,), (1,), (0, 1, 2, 4), (1, 3, 7)],
        fast=[(0, ()), (0, (1, 3, 7)), (1, (1,)), (1, (0, 1, 2, 4)), (299, (0,))],
    ),
    ids=str,
)
def test_any_number_may_pad_any_batches(pad, without):
    assert_same(type("Padding", (Padded,), {"pad": pad, "without": without}))


def test_labels_may_be_padded_by_another_number_than_torchs():
    assert_same(type("Padding", (Padded,), {"pad": 2, "name": "labels", "without": (1,)}))


def test_rows_may_be_padded_on_the_left():
    assert_same(PaddedOnTheLeft)


class Segmented(Kind):
    """Leaves out the void label of segmentation maps, which the first three batches lack."""

    def make_net(self):
        return nn.Conv2d(1, 150, 3, padding=1)

    def loss(self, batch):
        return F.cross_entropy(self.net(batch["image"]), batch["mask"], ignore_index=255)

    @classmethod
    def loader(cls):
        generator, rows = torch.Generator().manual_seed(0), []
        for row in range(40):
            mask = torch.randint(150, (6, 6), generator=generator)
            mask[: row % 5 if row >= 3 * ROWS else 0] = 255
            rows.append({"image": torch.randn(1, 6, 6, generator=generator), "mask": mask})
        return DataLoader(Rows(rows), batch_size=ROWS)


def test_the_void_label_of_segmentation_maps_is_left_out():
    plain, _ = fitted(Segmented)
    ours, _ = fitted(Segmented, UnifiedStrategy(micro_batch_size=3))

    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-9, atol=1e-11)
