"""Kinds of modules of the planner's benchmarks, and makers of their batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.planner.zoo.language import Diagnostics
from benchmarks.planner.zoo.learner import OPTIMIZERS, Learner

__all__ = [
    "Batch",
    "Kind",
    "Size",
    "graphs",
    "images",
    "labelled_images",
    "pairs",
    "size_of",
    "texts",
    "tokens",
    "vectors",
]

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a module and its batches are.

    Attributes:
        rows: Two batch sizes.
        data: Of the batch's tensors, such as `length` and `image`.
        net: Arguments of the network.
    """

    rows: tuple[int, int]
    data: Mapping[str, int]
    net: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One module of the table.

    Attributes:
        name: In the table.
        is_transformer: Whether it counts among the transformers.
        has_blocks: Whether there is something to recompute.
        net: Makes what is trained, from `Size.net`; the module itself if that is a LightningModule.
        rows: Makes a batch, from `Size` and a number of rows.
        cpu: Its size for a CPU: steps of a second, peaks of 50 to 400 MB where the module allows it.
        cuda: Its size for a large GPU.
        needs: Whether what it is made of is installed.
        settings: With how many settings it is measured; None for as many as its device has.
    """

    name: str
    net: Callable[..., Any]
    rows: Callable[[Size, int], Batch]
    cpu: Size
    cuda: Size
    is_transformer: bool = False
    has_blocks: bool = True
    needs: Callable[[], bool] = lambda: True
    settings: int | None = None

    def size(self, device: str) -> Size:
        """Return the size for `device`, `"cpu"` or `"cuda"`."""
        return self.cpu if device == "cpu" else self.cuda

    def build(self, device: str, *, optimizer: str = OPTIMIZERS[0]) -> L.LightningModule:
        """Return the module at its size for `device`, with weights on the CPU.

        The weights are a function of its name.
        """
        torch.manual_seed(sum(map(ord, self.name)))
        net = dict(self.size(device).net)
        if self.net is Diagnostics:
            return Diagnostics(optimizer=optimizer, **net)
        return Learner(self.net(**net), optimizer=optimizer)

    def batch(self, device: str, rows: int) -> Batch:
        """Return a batch of `rows` rows at the size for `device`, on the CPU."""
        torch.manual_seed(rows)
        return self.rows(self.size(device), rows)


def vectors(size: Size, rows: int) -> Batch:
    return {"x": torch.randn(rows, size.net["width"])}


def images(size: Size, rows: int) -> Batch:
    return {"image": torch.randn(rows, 3, size.data["image"], size.data["image"])}


def labelled_images(size: Size, rows: int) -> Batch:
    return {**images(size, rows), "label": torch.randint(100, (rows,))}


def tokens(size: Size, rows: int) -> Batch:
    return {"tokens": torch.randint(1, size.net["vocabulary"], (rows, size.data["length"]))}


def texts(size: Size, rows: int) -> Batch:
    read = tokens(size, rows)["tokens"]
    lengths = torch.randint(size.data["length"] // 2, size.data["length"] + 1, (rows, 1))
    padded = torch.arange(size.data["length"]) >= lengths
    return {"tokens": read.masked_fill(padded, 0), "padded": padded, "label": torch.randint(8, (rows,))}


def pairs(size: Size, rows: int) -> Batch:
    return {"source": tokens(size, rows)["tokens"], "target": tokens(size, rows)["tokens"]}


def graphs(size: Size, rows: int) -> Batch:
    nodes, edges = size.data["nodes"], size.data["edges"]
    return {
        "nodes": torch.randn(rows, nodes, size.net["features"]),
        "edges": torch.randint(nodes, (rows, 2, edges)),
        "label": torch.randint(16, (rows, nodes)),
    }


def size_of(rows: tuple[int, int], data: Mapping[str, int] | None = None, **net: Any) -> Size:
    return Size(rows=rows, data=data or {}, net=net)
