"""A loss may be a mean over the nodes or edges of a batch of graphs."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.losses import LossRule, candidates, restored
from tests.support.modules.plain import fit, weights


class Graphs:
    """A batch of graphs in torch_geometric's layout, one after another."""

    def __init__(self, graphs):
        self.graphs = list(graphs)
        starts = torch.tensor([0, *(len(x) for x, _, _ in graphs)]).cumsum(0)[:-1]
        self.x = torch.cat([x for x, _, _ in graphs])
        self.edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)], 1)
        self.y = torch.stack([y for _, _, y in graphs])
        self.of = torch.cat([torch.full((len(x),), index) for index, (x, _, _) in enumerate(graphs)])
        self.num_graphs, self.num_nodes, self.num_edges = len(graphs), len(self.x), self.edges.shape[1]

    def to_data_list(self):
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)

    def keys(self):
        return [name for name in vars(self) if not name.startswith("num")]


class OfNodes(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch.x), batch)

    def loss(self, out, batch):
        return F.cross_entropy(out, batch.y[batch.of])

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(1)
        graphs = []
        for index in range(18):
            nodes = 2 + index % 5
            x = torch.randn(nodes, 3, generator=generator, dtype=torch.float64)
            edges = torch.randint(0, nodes, (2, 1 + index % 4), generator=generator)
            graphs.append((x, edges, torch.tensor(index % 2)))
        return DataLoader(graphs, batch_size=9, collate_fn=Graphs)


class OfEdges(OfNodes):
    def loss(self, out, batch):
        first, second = batch.edges
        return F.softplus((out[first] * out[second]).sum(1)).mean()


class OfBoth(OfNodes):
    def loss(self, out, batch):
        return super().loss(out, batch) + OfEdges.loss(self, out, batch)


def trained(kind, strategy):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, module.loader(), strategy=strategy)
    return weights(module)


@pytest.mark.parametrize("kind", [OfNodes, OfEdges, OfBoth])
def test_means_over_nodes_and_edges_train_as_with_whole_batches(kind):
    split = trained(kind, UnifiedStrategy(micro_batch_size=2))

    torch.testing.assert_close(split, trained(kind, "auto"), rtol=1e-9, atol=1e-12)


def test_nodes_of_graphs_in_a_batch_of_more_are_counted_and_saved():
    batch = {"graphs": next(iter(OfNodes.loader())), "z": torch.zeros(9)}

    rules = {one.name: one for one in candidates(batch, 9)}
    nodes = rules["nodes of 'graphs'"]

    assert nodes.count is not None and nodes.count(batch) == batch["graphs"].num_nodes
    assert nodes.count({"z": batch["z"]}) == 0
    assert restored(nodes.state_dict(), MicroBatchRules()) == nodes
    assert "edges of 'graphs'" in rules and LossRule("rows") == rules["rows"]
