"""The modules that the planner is measured on.

Each has a builder, its batches, and its sizes for a CPU and for a large GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.planner.zoo.hub import Causal, Sequence, has_peft, has_transformers
from benchmarks.planner.zoo.language import Classifier, Decoder, Diagnostics, Translator, add_lora
from benchmarks.planner.zoo.learner import OPTIMIZERS, Learner
from benchmarks.planner.zoo.networks import Convolutional, Graph, Perceptron, Recurrent, Residual, UNet
from lightning_unified.data.documents.error_codes import NUM_CODE_IDS, NUM_SUBSYSTEMS

__all__ = ["MODULES", "Kind", "Size", "available"]

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
    """

    name: str
    net: Callable[..., Any]
    rows: Callable[[Size, int], Batch]
    cpu: Size
    cuda: Size
    is_transformer: bool = False
    has_blocks: bool = True
    needs: Callable[[], bool] = lambda: True

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


def _vectors(size: Size, rows: int) -> Batch:
    return {"x": torch.randn(rows, size.net["width"])}


def _images(size: Size, rows: int) -> Batch:
    return {"image": torch.randn(rows, 3, size.data["image"], size.data["image"])}


def _labelled_images(size: Size, rows: int) -> Batch:
    return {**_images(size, rows), "label": torch.randint(100, (rows,))}


def _tokens(size: Size, rows: int) -> Batch:
    return {"tokens": torch.randint(1, size.net["vocabulary"], (rows, size.data["length"]))}


def _texts(size: Size, rows: int) -> Batch:
    tokens = _tokens(size, rows)["tokens"]
    lengths = torch.randint(size.data["length"] // 2, size.data["length"] + 1, (rows, 1))
    padded = torch.arange(size.data["length"]) >= lengths
    return {"tokens": tokens.masked_fill(padded, 0), "padded": padded, "label": torch.randint(8, (rows,))}


def _pairs(size: Size, rows: int) -> Batch:
    return {"source": _tokens(size, rows)["tokens"], "target": _tokens(size, rows)["tokens"]}


def _graphs(size: Size, rows: int) -> Batch:
    nodes, edges = size.data["nodes"], size.data["edges"]
    return {
        "nodes": torch.randn(rows, nodes, size.net["features"]),
        "edges": torch.randint(nodes, (rows, 2, edges)),
        "label": torch.randint(16, (rows, nodes)),
    }


def _diagnostics(size: Size, rows: int) -> Batch:
    length = size.data["length"]
    ids = torch.randint(9, 4096, (rows, length))
    asked, codes = torch.full_like(ids, -100), torch.zeros_like(ids)
    asked[:, 40] = torch.randint(NUM_SUBSYSTEMS, (rows,))
    codes[:, 41:45] = torch.randint(1, NUM_CODE_IDS, (rows, 4))
    return {"input_ids": ids, "labels": ids.clone(), "error_code_ids": codes, "diagnosis_labels": asked}


def _lora(*, rank: int, **sizes: int) -> Decoder:
    return add_lora(Decoder(**sizes), rank=rank)


def _gearhead(name: str, *, cpu: tuple[int, tuple[int, int]], cuda: tuple[int, tuple[int, int]]) -> Kind:
    """Return GearHead's preset `name`; `cpu` and `cuda` are length and rows."""
    net = {"preset": name}
    sizes = [Size(rows=rows, data={"length": length}, net=net) for length, rows in (cpu, cuda)]
    return Kind(name=name, is_transformer=True, net=Diagnostics, rows=_diagnostics, cpu=sizes[0], cuda=sizes[1])


def _size(rows: tuple[int, int], data: Mapping[str, int] | None = None, **net: Any) -> Size:
    return Size(rows=rows, data=data or {}, net=net)


_ALL = (
    Kind(
        name="mlp", net=Perceptron, rows=_vectors,
        cpu=_size((384, 1000), width=1024, depth=6),
        cuda=_size((4096, 10_000), width=4096, depth=12),
    ),
    Kind(
        name="cnn", net=Convolutional, rows=_labelled_images, has_blocks=False,
        cpu=_size((16, 48), {"image": 64}, width=32, depth=6),
        cuda=_size((64, 160), {"image": 224}, width=64, depth=8),
    ),
    Kind(
        name="resnet", net=Residual, rows=_labelled_images,
        cpu=_size((8, 24), {"image": 96}, width=32, blocks=2),
        cuda=_size((120, 300), {"image": 224}, width=64, blocks=3),
    ),
    Kind(
        name="lstm", net=Recurrent, rows=_tokens, has_blocks=False,
        cpu=_size((6, 16), {"length": 65}, cell="lstm", vocabulary=4000, width=256, depth=2),
        cuda=_size((64, 128), {"length": 129}, cell="lstm", vocabulary=32_000, width=1024, depth=3),
    ),
    Kind(
        name="gru", net=Recurrent, rows=_tokens, has_blocks=False,
        cpu=_size((6, 16), {"length": 65}, cell="gru", vocabulary=4000, width=256, depth=2),
        cuda=_size((64, 128), {"length": 129}, cell="gru", vocabulary=32_000, width=1024, depth=3),
    ),
    _gearhead("gearhead-small", cpu=(128, (4, 12)), cuda=(256, (48, 200))),
    _gearhead("gearhead-34m", cpu=(96, (2, 3)), cuda=(512, (16, 64))),
    _gearhead("gearhead-118m", cpu=(64, (1, 2)), cuda=(1024, (6, 16))),
    Kind(
        name="bert-like", is_transformer=True, net=Classifier, rows=_texts,
        cpu=_size((4, 10), {"length": 96}, vocabulary=8000, width=256, depth=4, length=96),
        cuda=_size((24, 56), {"length": 384}, vocabulary=30_000, width=768, depth=12, length=384),
    ),
    Kind(
        name="encoder-decoder", is_transformer=True, net=Translator, rows=_pairs,
        cpu=_size((4, 10), {"length": 65}, vocabulary=8000, width=256, depth=2),
        cuda=_size((12, 28), {"length": 257}, vocabulary=32_000, width=768, depth=6),
    ),
    Kind(
        name="moe, fixed capacity", is_transformer=True, net=Decoder, rows=_tokens,
        cpu=_size((2, 6), {"length": 97}, vocabulary=4000, width=256, depth=2, length=96, experts=4, capacity=1.25),
        cuda=_size((8, 20), {"length": 513}, vocabulary=32_000, width=512, depth=8, length=512, experts=8, capacity=1.25),
    ),
    Kind(
        name="moe, shapes by values", is_transformer=True, net=Decoder, rows=_tokens,
        cpu=_size((2, 6), {"length": 97}, vocabulary=4000, width=256, depth=2, length=96, experts=4),
        cuda=_size((8, 20), {"length": 513}, vocabulary=32_000, width=512, depth=8, length=512, experts=8),
    ),
    Kind(
        name="lora, frozen lm", is_transformer=True, net=_lora, rows=_tokens,
        cpu=_size((2, 6), {"length": 129}, vocabulary=8000, width=384, depth=4, length=128, rank=8),
        cuda=_size((2, 5), {"length": 1025}, vocabulary=32_000, width=2048, depth=16, length=1024, rank=16),
    ),
    Kind(
        name="u-net", net=UNet, rows=_images,
        cpu=_size((2, 6), {"image": 64}, width=32, depth=2),
        cuda=_size((8, 20), {"image": 256}, width=64, depth=4),
    ),
    Kind(
        name="graph scatter", net=Graph, rows=_graphs,
        cpu=_size((12, 40), {"nodes": 500, "edges": 4000}, features=32, width=64, depth=4),
        cuda=_size((4, 9), {"nodes": 10_000, "edges": 100_000}, features=64, width=128, depth=6),
    ),
    Kind(
        name="tied 150k vocabulary", is_transformer=True, net=Decoder, rows=_tokens,
        cpu=_size((1, 3), {"length": 49}, vocabulary=150_000, width=64, depth=2, length=48),
        cuda=_size((2, 5), {"length": 1025}, vocabulary=150_000, width=512, depth=6, length=1024),
    ),
    Kind(
        name="llama (transformers)", is_transformer=True, net=Causal, rows=_tokens, needs=has_transformers,
        cpu=_size((2, 6), {"length": 96}, vocabulary=8000, width=256, depth=4),
        cuda=_size((4, 10), {"length": 1024}, vocabulary=32_000, width=1024, depth=12),
    ),
    Kind(
        name="bert (transformers)", is_transformer=True, net=Sequence, rows=_texts, needs=has_transformers,
        cpu=_size((4, 10), {"length": 96}, vocabulary=8000, width=256, depth=4),
        cuda=_size((24, 56), {"length": 384}, vocabulary=30_000, width=768, depth=12),
    ),
    Kind(
        name="lora (peft)", is_transformer=True, net=Causal, rows=_tokens, needs=has_peft,
        cpu=_size((2, 6), {"length": 96}, vocabulary=8000, width=384, depth=4, rank=8),
        cuda=_size((4, 12), {"length": 1024}, vocabulary=32_000, width=1536, depth=16, rank=16),
    ),
)  # fmt: skip

_NARROW = _size((7500, 30_000), width=384, depth=6)
_BESIDE = (Kind(name="mlp, narrow", net=Perceptron, rows=_vectors, cpu=_NARROW, cuda=_NARROW),)
"""What takes much memory for little computing, for budgets on a CPU; in no other table."""

MODULES: Mapping[str, Kind] = {kind.name: kind for kind in (*_ALL, *_BESIDE)}


def available() -> dict[str, Kind]:
    """Return the modules of the tables whose libraries are installed."""
    return {kind.name: kind for kind in _ALL if kind.needs()}
