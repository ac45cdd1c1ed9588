"""Batches of other kinds are split.

They are mappings of their own class, packed sequences, graphs, TensorDicts and nested tensors.
"""

from collections import UserDict

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, RowRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.results.by_shape import merge
from lightning_unified.step.split import BatchShape, BatchSplitter, elements_per_row, positions
from tests.support.lanes import crossed, first_cells
from tests.support.modules.plain import fit, weights


def splitter(rows=None, **rules):
    count = None if rows is None else lambda _: rows
    return BatchSplitter(L.LightningModule(), MicroBatchRules(rows=RowRules(count=count, **rules)))


class Encoding(UserDict):
    """Like transformers' BatchEncoding: a mapping that is no dict, with attributes."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Graphs:
    """A batch of graphs in torch_geometric's layout.

    All nodes stand one after another, each with the index of its graph.
    """

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


@first_cells(
    1, ("kind", "size"), crossed([GraphNet, Recurrent], [1, 2, 3], fast=[(GraphNet, 1), (GraphNet, 3), (Recurrent, 2)])
)
def test_a_split_batch_of_another_kind_trains_as_the_whole(kind, size):
    torch.manual_seed(0)
    whole = kind().double()
    fit(whole, whole.loader())
    torch.manual_seed(0)
    module = kind().double()
    _, trainer = fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=size))

    assert trainer.strategy.micro_batch_size <= size
    torch.testing.assert_close(weights(module), weights(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences_are_split_and_merged_without_loss(in_order):
    lengths = [5, 4, 2, 1] if in_order else [2, 5, 1, 4]
    rows = [torch.randn(length, 3) for length in lengths]
    batch = {"x": pack_sequence(rows, enforce_sorted=in_order), "y": torch.arange(4)}
    one = splitter()
    assert one.shape(batch).rows == 4
    parts = [one.split(batch, 0, 3, rows=4), one.split(batch, 3, 4, rows=4)]
    again = merge(parts, sizes=[3, 1], average=lambda values: values[0])

    assert all(isinstance(part["x"], PackedSequence) for part in parts)
    assert torch.equal(again["y"], batch["y"])
    for mine, row in zip(unpack_sequence(again["x"]), rows, strict=True):
        assert torch.equal(mine, row)


def test_a_mapping_of_its_own_class_stays_one_and_the_whole_is_unchanged():
    batch = Encoding({"input_ids": torch.arange(12).reshape(4, 3), "names": list("abcd")}, encodings="kept")
    part = splitter().split(batch, 1, 3, rows=4)

    assert type(part) is Encoding
    assert part.encodings == "kept"
    assert part.input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part["names"] == ["b", "c"]
    assert len(batch["input_ids"]) == 4


def test_the_encodings_of_transformers_are_split():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)})
    part = splitter().split(batch, 0, 2, rows=4)

    assert isinstance(part, transformers.BatchEncoding)
    assert part.input_ids.shape == (2, 3)
    assert part["labels"].tolist() == [0, 1]


def test_rows_that_cannot_be_seen_are_counted_by_the_rules():
    module, counts = L.LightningModule(), MicroBatchRules(rows=RowRules(count=lambda batch: batch))

    assert BatchSplitter(module, counts).shape(6) == BatchShape(6, 0)
    assert BatchSplitter(module, counts).shape(0) is None
    with pytest.raises(SplitError, match=r"RowRules\(count=…\) of LightningModule returned 0"):
        BatchSplitter(module, counts).require_shape(0)
    assert BatchSplitter(module, MicroBatchRules()).shape(object()) is None


def test_a_batch_without_rows_says_what_to_do():
    with pytest.raises(
        SplitError, match=r"no entry with a row dimension.*RowRules\(split=…, count=…\).*splittable=False"
    ):
        splitter().require_shape({"scale": 3.0})


def test_longer_rows_have_more_elements():
    short, long = {"x": torch.zeros(4, 8), "y": torch.zeros(4)}, {"x": torch.zeros(4, 16), "y": torch.zeros(4)}

    assert elements_per_row(short, 4) == 9
    assert elements_per_row(long, 4) == 17
    assert elements_per_row(pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), 2) >= 4


class Listed(Graphs):
    """Graphs that can be listed and put together again, as torch_geometric's `Batch`."""

    def to_data_list(self):
        return [self.graph(index) for index in range(self.num_graphs)]

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)


def test_graphs_that_can_be_listed_are_split_by_that():
    batch = Listed([(torch.full((1 + index, 3), float(index)), torch.tensor([index])) for index in range(5)])
    one = splitter()

    assert one.shape((batch, torch.arange(5))).rows == 5
    part, labels = one.split((batch, torch.arange(5)), 1, 3, rows=5)
    assert type(part) is Listed and part.num_graphs == 2
    assert part.y.flatten().tolist() == [1, 2] == labels.tolist()


def test_graphs_that_cannot_be_listed_are_refused_and_count_their_rows():
    batch, one = Graphs([(torch.zeros(2, 3), torch.zeros(1))] * 4), splitter()

    assert one.shape(batch).rows == 4
    with pytest.raises(SplitError, match=r"Graphs counts its rows \(num_graphs=4\).*to_data_list"):
        one.split(batch, 0, 2, rows=4)


def test_batches_of_torch_geometric_are_split_without_a_rule():
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.full((1 + index, 3), float(index)), y=torch.tensor([index])) for index in range(5)]
    batch, one = data.Batch.from_data_list(graphs), splitter()

    assert one.shape(batch).rows == 5
    part = one.split(batch, 1, 3, rows=5)
    assert part.num_graphs == 2
    assert part.y.tolist() == [1, 2]


def test_tensor_dicts_are_split_and_merged_by_their_batch_size():
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"z": torch.arange(8).reshape(4, 2)}, [4])
    batch = {"data": tensordict.TensorDict({"x": torch.arange(4), "inner": inner}, [4]), "y": torch.arange(4)}
    one = splitter()
    assert one.shape(batch).rows == 4
    parts = [one.split(batch, 0, 3, rows=4), one.split(batch, 3, 4, rows=4)]
    again = merge(parts, sizes=[3, 1], average=lambda values: values[0])

    assert [part["data"].batch_size[0] for part in parts] == [3, 1]
    assert again["data"].batch_size == batch["data"].batch_size
    assert torch.equal(again["data"]["inner", "z"], inner["z"])


def test_a_tensor_dict_without_a_batch_size_is_split_entry_by_entry():
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": torch.arange(8).reshape(4, 2), "w": torch.zeros(3)}, [])
    part = splitter(4).split(batch, 1, 3, rows=4)

    assert isinstance(part, tensordict.TensorDict)
    assert part["x"].shape == (2, 2) and part["w"].shape == (3,)
    assert batch["x"].shape == (4, 2)


def test_tensor_classes_are_split():
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Rows:
        x: torch.Tensor
        name: str

    part = splitter().split(Rows(x=torch.arange(4), name="a", batch_size=[4]), 1, 3, rows=4)
    assert isinstance(part, Rows)
    assert part.x.tolist() == [1, 2] and part.name == "a"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_split_by_their_components(layout):
    rows = [torch.randn(length, 3) for length in (2, 4, 1)]
    batch, one = {"x": torch.nested.nested_tensor(rows, layout=layout), "y": torch.arange(3)}, splitter()

    assert one.shape(batch).rows == 3
    part = one.split(batch, 1, 3, rows=3)
    assert part["x"].layout == layout
    assert all(torch.equal(*pair) for pair in zip(part["x"].unbind(), rows[1:], strict=True))


def test_arrays_and_sparse_matrices_are_split():
    eye = torch.eye(4)
    part = splitter().split({"ids": np.arange(4), "edges": eye.to_sparse()}, 1, 3, rows=4)

    assert part["ids"].tolist() == [1, 2]
    assert torch.equal(part["edges"].to_dense(), eye[1:3])
    with pytest.raises(SplitError, match=r"layout torch.sparse_csr cannot be split"):
        splitter().split({"x": torch.zeros(4), "edges": eye.to_sparse_csr()}, 1, 3, rows=4)


def test_positions_of_a_row_are_told_with_and_without_its_features():
    assert positions({"x": torch.zeros(4, 8, 3), "y": torch.zeros(4), "other": torch.zeros(9, 2)}, 4) == {1, 8, 24}
