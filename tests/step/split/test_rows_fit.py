"""Fits on batches of many structures.

They are split and equal plain Lightning, or are refused before a wrong update.
"""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_unified import MicroBatchRules, RowRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import fit, weights

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(19, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (19,), generator=GENERATOR)
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
MATRIX = torch.randn(6, 6, generator=GENERATOR, dtype=torch.float64)


class Net(L.LightningModule):
    """Loss of its batches is what `error` says of outputs and the batch."""

    def __init__(self, error):
        super().__init__()
        self.net, self.error = nn.Linear(6, 3), error

    def training_step(self, batch, batch_idx):
        return self.error(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(19))


@dataclass
class Record:
    x: torch.Tensor
    names: list
    weights: torch.Tensor


def rows(kind, collate, **options):
    return lambda: DataLoader(kind, collate_fn=collate, **{"batch_size": 8, **options})


def weighted(net, batch):
    return ((net(batch["x"]) - batch["x"][:, :3]) ** 2 * batch["w"]).mean()


def shared_weights(indices):
    return {"x": X[indices], "w": CLASS_WEIGHTS.clone()}


def recorded(net, batch):
    assert len(batch.names) == len(batch.x)
    return ((net(batch.x) - batch.x[:, :3]) ** 2 * batch.weights).mean()


def each(net, batch):
    return torch.stack([net(row).logsumexp(-1).mean() for row in batch]).mean()


def ragged(indices):
    return [X[index : index + 1 + index % 4] for index in indices]


def detected(net, batch):
    pairs = zip(*batch, strict=True)
    return torch.stack([(net(image).mean() - target["boxes"].mean()) ** 2 for image, target in pairs]).mean()


def detections(indices):
    boxes = ({"boxes": X[index : index + 1 + index % 3]} for index in indices)
    return tuple(
        zip(*[(X[index % 9 : index % 9 + 3], box) for index, box in zip(indices, boxes, strict=True)], strict=True)
    )


def through_matrix(net, batch):
    x, matrix, y = batch
    return F.cross_entropy(net(x @ matrix), y)


def nested(net, batch):
    return each(net, batch["rows"].unbind())


def of_tensor_dict(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["y"])


def tensor_dict(indices):
    return pytest.importorskip("tensordict").TensorDict({"x": X[indices], "y": Y[indices]}, [len(indices)])


def nested_rows(layout):
    return lambda indices: {"rows": torch.nested.nested_tensor(ragged(indices), layout=layout)}


KINDS = {
    "shared weights, last batch of 3": (weighted, rows(range(19), shared_weights)),
    "shared weights, iterable data": (weighted, rows(Stream(), shared_weights)),
    "shared weights, batches of 3": (weighted, rows(range(19), shared_weights, batch_size=3)),
    "dataclass": (recorded, rows(range(19), lambda i: Record(X[i], list(map(str, i)), CLASS_WEIGHTS))),
    "ragged list": (each, rows(range(12), ragged, batch_size=4)),
    "ragged list as it is": (each, lambda: DataLoader(ragged(range(12)), batch_size=4, collate_fn=list)),
    "detection, last batch of 3": (detected, rows(range(19), detections, batch_size=4)),
    "detection, batches of 3": (detected, rows(range(18), detections, batch_size=3)),
    "shared matrix, last batch of 3": (through_matrix, rows(range(19), lambda i: (X[i], MATRIX, Y[i]))),
    "shared matrix, batches of 6": (through_matrix, rows(range(18), lambda i: (X[i], MATRIX, Y[i]), batch_size=6)),
    "pairs of 2 rows": (
        lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        rows(TensorDataset(X, Y), None, batch_size=2),
    ),
    "nested tensors": (nested, rows(range(12), nested_rows(torch.strided), batch_size=4)),
    "jagged tensors": (nested, rows(range(12), nested_rows(torch.jagged), batch_size=4)),
    "tensor dicts": (of_tensor_dict, rows(range(19), tensor_dict)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@first_cells(6, "kind", KINDS)
def test_a_split_run_ends_with_the_weights_of_plain_lightning(kind):
    error, loader = KINDS[kind]
    ends = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=1)):
        torch.manual_seed(0)
        module = Net(error).double()
        fit(module, loader(), strategy=strategy, max_epochs=1)
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


class Held:
    """A batch as PyTorch's documentation has custom ones."""

    def __init__(self, indices):
        self.x, self.y = X[indices], Y[indices]

    def to(self, *args, **kwargs):
        return self


class Graphs(Held):
    num_graphs = property(lambda self: len(self.x))


def of_held(net, batch):
    return F.cross_entropy(net(batch.x), batch.y)


@pytest.mark.parametrize("kind", [Held, Graphs])
def test_batches_that_cannot_be_split_are_refused_and_run_whole_where_they_fit(kind):
    with pytest.raises(SplitError, match=rf"type {kind.__name__}.*RowRules\(split=…, count=…\)"):
        fit(Net(of_held).double(), rows(range(19), kind)(), strategy=UnifiedStrategy(micro_batch_size=4))
    for strategy in ("unified", UnifiedStrategy(micro_batch_size=8)):
        _, trainer = fit(Net(of_held).double(), rows(range(19), kind)(), strategy=strategy, max_epochs=1)
        assert trainer.global_step == 3


def of_both(net, batch):
    return sum(F.cross_entropy(net(x), y) for x, y in (batch["a"], batch["b"]))


def combined(first, second):
    loaders = {"a": DataLoader(first, batch_size=4), "b": DataLoader(second, batch_size=4)}
    return CombinedLoader(loaders, "min_size")


def test_sub_batches_are_split_together_until_they_have_other_rows():
    data, shorter = TensorDataset(X, Y), TensorDataset(X[:18], Y[:18])
    ends = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=1)):
        torch.manual_seed(0)
        module = Net(of_both).double()
        fit(module, combined(data, data), strategy=strategy, max_epochs=1)
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)

    with pytest.raises(SplitError, match=r"a\.0 has 3, a\.1 has 3, b\.0 has 2"):
        fit(Net(of_both).double(), combined(data, shorter), strategy=UnifiedStrategy(micro_batch_size=1))
    torch.testing.assert_close(weights(module), ends[1])


class Counted(Net):
    """Counts the rows of its training batches; those of validation are of another kind."""

    def __init__(self):
        super().__init__(of_tensor_dict)

    def configure_micro_batches(self, stage):
        return MicroBatchRules(rows=RowRules(count=lambda batch: len(batch["x"])))

    def validation_step(self, batch, batch_idx):
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_a_count_of_rows_is_not_asked_of_validation_batches_that_run_whole():
    module = Counted().double()
    module.val_dataloader = lambda: DataLoader(TensorDataset(X, Y), batch_size=8)
    _, trainer = fit(
        module,
        rows(range(19), lambda i: {"x": X[i], "y": Y[i]})(),
        strategy=UnifiedStrategy(micro_batch_size=3),
        max_epochs=1,
    )
    assert "validation" in trainer.callback_metrics


class Predicts(L.LightningModule):
    """Its first loader gives 3 shared weights beside the rows.

    Its second loader gives a value of each row.
    """

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        rows, other = batch
        return rows.sum(-1) + (other if dataloader_idx else other.sum())


def test_each_loader_of_an_evaluation_has_rows_of_its_own():
    found = []
    for strategy in ("auto", UnifiedStrategy(evaluation_micro_batch_size=2)):
        loaders = [
            rows(range(7), lambda i: (X[i], CLASS_WEIGHTS), batch_size=4)(),
            rows(range(6), lambda i: (X[i], Y[i]), batch_size=3)(),
        ]
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_progress_bar=False)
        found.append([torch.cat(one) for one in trainer.predict(Predicts(), loaders)])
    torch.testing.assert_close(*found)
