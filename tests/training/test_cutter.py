"""Batches of other kinds are cut: mappings of their own class, packed sequences, graphs through the module's rules."""

from collections import UserDict

import lightning as L
import pytest
import torch
from modules import fit, weights
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, RowRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.training.cutter import Cutter
from lightning_unified.training.split import BatchShape, cut, elements_per_row, merge, num_rows, positions


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping that is no dict, with attributes beside its entries."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Graphs:
    """A batch of graphs as torch_geometric lays it out: all nodes one after another, and to which graph each belongs."""

    def __init__(self, graphs):
        self.x = torch.cat([x for x, _ in graphs])
        self.y = torch.stack([y for _, y in graphs])
        self.of = torch.cat([torch.full((len(x),), index) for index, (x, _) in enumerate(graphs)])
        self.num_graphs = len(graphs)

    def graph(self, index):
        return self.x[self.of == index], self.y[index]


class GraphNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        sums = torch.zeros(batch.num_graphs, 1, dtype=batch.x.dtype).index_add(0, batch.of, self.net(batch.x))
        return (sums - batch.y).pow(2).mean()

    def configure_micro_batches(self, stage):
        return MicroBatchRules(rows=RowRules(split=self.graphs))

    def graphs(self, batch, start, stop):
        return Graphs([batch.graph(index) for index in range(start, stop)])

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(1)
        graphs = [
            (
                torch.randn(1 + index % 4, 3, generator=generator, dtype=torch.float64),
                torch.randn(1, generator=generator, dtype=torch.float64),
            )
            for index in range(10)
        ]
        return DataLoader(graphs, batch_size=4, collate_fn=Graphs)


class Recurrent(L.LightningModule):
    """Reads packed sequences, as RNNs do."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        sequences, targets = batch
        _, last = self.rnn(sequences)
        return (self.head(last[0])[:, 0] - targets).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(1)
        rows = [
            (torch.randn(1 + (7 * index) % 5, 2, generator=generator, dtype=torch.float64), float(index % 3))
            for index in range(10)
        ]
        return DataLoader(rows, batch_size=4, collate_fn=packed)


def packed(rows):
    targets = torch.tensor([target for _, target in rows], dtype=torch.float64)
    return pack_sequence([row for row, _ in rows], enforce_sorted=False), targets


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [GraphNet, Recurrent])
def test_a_cut_batch_of_another_kind_trains_as_the_whole(kind, size):
    torch.manual_seed(0)
    whole = kind().double()
    fit(whole, whole.loader())
    torch.manual_seed(0)
    module = kind().double()
    _, trainer = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=size))

    assert trainer.strategy.micro_batch_size <= size
    torch.testing.assert_close(weights(module), weights(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences_are_cut_and_merged_without_loss(in_order):
    lengths = [5, 4, 2, 1] if in_order else [2, 5, 1, 4]
    rows = [torch.randn(length, 3) for length in lengths]
    batch = {"x": pack_sequence(rows, enforce_sorted=in_order), "y": torch.arange(4)}
    assert num_rows(batch) == 4
    parts = [cut(batch, 0, 3, rows=4), cut(batch, 3, 4, rows=4)]
    again = merge(parts, sizes=[3, 1], average=lambda values: values[0])

    assert all(isinstance(part["x"], PackedSequence) for part in parts)
    assert torch.equal(again["y"], batch["y"])
    for mine, row in zip(unpack_sequence(again["x"]), rows, strict=True):
        assert torch.equal(mine, row)


def test_a_mapping_of_its_own_class_stays_one_and_the_whole_is_unchanged():
    batch = Encoding({"input_ids": torch.arange(12).reshape(4, 3), "names": list("abcd")}, encodings="kept")
    part = cut(batch, 1, 3, rows=4)

    assert type(part) is Encoding
    assert part.encodings == "kept"
    assert part.input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part["names"] == ["b", "c"]
    assert len(batch["input_ids"]) == 4


def test_the_encodings_of_transformers_are_cut():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)})
    part = cut(batch, 0, 2, rows=num_rows(batch))

    assert isinstance(part, transformers.BatchEncoding)
    assert part.input_ids.shape == (2, 3)
    assert part["labels"].tolist() == [0, 1]


def test_rows_that_cannot_be_seen_are_counted_by_the_rules():
    module, counts = L.LightningModule(), MicroBatchRules(rows=RowRules(count=lambda batch: batch))

    assert Cutter(module, counts).shape(6) == BatchShape(6, 0)
    with pytest.raises(SplitError, match=r"RowRules\(count=…\) of LightningModule returned 0"):
        Cutter(module, counts).shape(0)
    assert Cutter(module, MicroBatchRules()).shape(object()) is None


def test_longer_rows_have_more_elements():
    short, long = {"x": torch.zeros(4, 8), "y": torch.zeros(4)}, {"x": torch.zeros(4, 16), "y": torch.zeros(4)}

    assert elements_per_row(short, 4) == 9
    assert elements_per_row(long, 4) == 17
    assert elements_per_row(pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), 2) >= 4


def test_batches_of_torch_geometric_are_split_by_the_rule():
    data = pytest.importorskip("torch_geometric.data")

    def split(batch, start, stop):
        return data.Batch.from_data_list(batch.to_data_list()[start:stop])

    graphs = [data.Data(x=torch.full((1 + index, 3), float(index)), y=torch.tensor([index])) for index in range(5)]
    rules = MicroBatchRules(rows=RowRules(split=split))
    batch, cutter = data.Batch.from_data_list(graphs), Cutter(L.LightningModule(), rules)
    part = cutter.cut(batch, 1, 3, rows=5)

    assert cutter.shape(batch).rows == 5
    assert part.num_graphs == 2
    assert part.y.tolist() == [1, 2]


def test_positions_of_a_row_are_told_with_and_without_its_features():
    assert positions({"x": torch.zeros(4, 8, 3), "y": torch.zeros(4), "other": torch.zeros(9, 2)}, 4) == {1, 8, 24}
