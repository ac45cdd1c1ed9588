"""The modules that the planner is measured on.

Each has a builder, its batches, and its sizes for a CPU and for a large GPU.
"""

from collections.abc import Mapping

import torch

from benchmarks.planner.zoo.hub import Causal, Sequence, has_peft, has_transformers
from benchmarks.planner.zoo.kinds import (
    Batch,
    Kind,
    Size,
    graphs,
    images,
    labelled_images,
    pairs,
    size_of,
    texts,
    tokens,
    vectors,
)
from benchmarks.planner.zoo.language import Classifier, Decoder, Diagnostics, Translator, add_lora
from benchmarks.planner.zoo.networks import Convolutional, Graph, Perceptron, Recurrent, Residual, UNet
from benchmarks.planner.zoo.unseen import UNSEEN
from lightning_unified.data.documents.error_codes import NUM_CODE_IDS, NUM_SUBSYSTEMS

__all__ = ["MODULES", "Kind", "Size", "available"]


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


_ALL = (
    Kind(
        name="mlp", net=Perceptron, rows=vectors,
        cpu=size_of((384, 1000), width=1024, depth=6),
        cuda=size_of((4096, 10_000), width=4096, depth=12),
    ),
    Kind(
        name="cnn", net=Convolutional, rows=labelled_images, has_blocks=False,
        cpu=size_of((16, 48), {"image": 64}, width=32, depth=6),
        cuda=size_of((64, 160), {"image": 224}, width=64, depth=8),
    ),
    Kind(
        name="resnet", net=Residual, rows=labelled_images,
        cpu=size_of((8, 24), {"image": 96}, width=32, blocks=2),
        cuda=size_of((120, 300), {"image": 224}, width=64, blocks=3),
    ),
    Kind(
        name="lstm", net=Recurrent, rows=tokens, has_blocks=False,
        cpu=size_of((6, 16), {"length": 65}, cell="lstm", vocabulary=4000, width=256, depth=2),
        cuda=size_of((64, 128), {"length": 129}, cell="lstm", vocabulary=32_000, width=1024, depth=3),
    ),
    Kind(
        name="gru", net=Recurrent, rows=tokens, has_blocks=False,
        cpu=size_of((6, 16), {"length": 65}, cell="gru", vocabulary=4000, width=256, depth=2),
        cuda=size_of((64, 128), {"length": 129}, cell="gru", vocabulary=32_000, width=1024, depth=3),
    ),
    _gearhead("gearhead-small", cpu=(128, (4, 12)), cuda=(256, (48, 200))),
    _gearhead("gearhead-34m", cpu=(96, (2, 3)), cuda=(512, (16, 64))),
    _gearhead("gearhead-118m", cpu=(64, (1, 2)), cuda=(1024, (6, 16))),
    Kind(
        name="bert-like", is_transformer=True, net=Classifier, rows=texts,
        cpu=size_of((4, 10), {"length": 96}, vocabulary=8000, width=256, depth=4, length=96),
        cuda=size_of((24, 56), {"length": 384}, vocabulary=30_000, width=768, depth=12, length=384),
    ),
    Kind(
        name="encoder-decoder", is_transformer=True, net=Translator, rows=pairs,
        cpu=size_of((4, 10), {"length": 65}, vocabulary=8000, width=256, depth=2),
        cuda=size_of((12, 28), {"length": 257}, vocabulary=32_000, width=768, depth=6),
    ),
    Kind(
        name="moe, fixed capacity", is_transformer=True, net=Decoder, rows=tokens,
        cpu=size_of((2, 6), {"length": 97}, vocabulary=4000, width=256, depth=2, length=96, experts=4, capacity=1.25),
        cuda=size_of((8, 20), {"length": 513}, vocabulary=32_000, width=512, depth=8, length=512, experts=8, capacity=1.25),
    ),
    Kind(
        name="moe, shapes by values", is_transformer=True, net=Decoder, rows=tokens,
        cpu=size_of((2, 6), {"length": 97}, vocabulary=4000, width=256, depth=2, length=96, experts=4),
        cuda=size_of((8, 20), {"length": 513}, vocabulary=32_000, width=512, depth=8, length=512, experts=8),
    ),
    Kind(
        name="lora, frozen lm", is_transformer=True, net=_lora, rows=tokens,
        cpu=size_of((2, 6), {"length": 129}, vocabulary=8000, width=384, depth=4, length=128, rank=8),
        cuda=size_of((2, 5), {"length": 1025}, vocabulary=32_000, width=2048, depth=16, length=1024, rank=16),
    ),
    Kind(
        name="u-net", net=UNet, rows=images,
        cpu=size_of((2, 6), {"image": 64}, width=32, depth=2),
        cuda=size_of((8, 20), {"image": 256}, width=64, depth=4),
    ),
    Kind(
        name="graph scatter", net=Graph, rows=graphs,
        cpu=size_of((12, 40), {"nodes": 500, "edges": 4000}, features=32, width=64, depth=4),
        cuda=size_of((4, 9), {"nodes": 10_000, "edges": 100_000}, features=64, width=128, depth=6),
    ),
    Kind(
        name="tied 150k vocabulary", is_transformer=True, net=Decoder, rows=tokens,
        cpu=size_of((1, 3), {"length": 49}, vocabulary=150_000, width=64, depth=2, length=48),
        cuda=size_of((2, 5), {"length": 1025}, vocabulary=150_000, width=512, depth=6, length=1024),
    ),
    Kind(
        name="llama (transformers)", is_transformer=True, net=Causal, rows=tokens, needs=has_transformers,
        cpu=size_of((2, 6), {"length": 96}, vocabulary=8000, width=256, depth=4),
        cuda=size_of((4, 10), {"length": 1024}, vocabulary=32_000, width=1024, depth=12),
    ),
    Kind(
        name="bert (transformers)", is_transformer=True, net=Sequence, rows=texts, needs=has_transformers,
        cpu=size_of((4, 10), {"length": 96}, vocabulary=8000, width=256, depth=4),
        cuda=size_of((24, 56), {"length": 384}, vocabulary=30_000, width=768, depth=12),
    ),
    Kind(
        name="lora (peft)", is_transformer=True, net=Causal, rows=tokens, needs=has_peft,
        cpu=size_of((2, 6), {"length": 96}, vocabulary=8000, width=384, depth=4, rank=8),
        cuda=size_of((4, 12), {"length": 1024}, vocabulary=32_000, width=1536, depth=16, rank=16),
    ),
)  # fmt: skip

_NARROW = size_of((7500, 30_000), width=384, depth=6)
_BESIDE = (Kind(name="mlp, narrow", net=Perceptron, rows=vectors, cpu=_NARROW, cuda=_NARROW),)
"""What takes much memory for little computing, for budgets on a CPU; in no other table."""

MODULES: Mapping[str, Kind] = {kind.name: kind for kind in (*_ALL, *UNSEEN, *_BESIDE)}


def available() -> dict[str, Kind]:
    """Return the modules of the tables whose libraries are installed."""
    return {kind.name: kind for kind in (*_ALL, *UNSEEN) if kind.needs()}
