"""Modules of kinds that the cost model was not made from.

Each is measured with a few settings.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.planner.zoo.hub import Experts, Translation, has_transformers
from benchmarks.planner.zoo.images import (
    Autoencoder,
    Codebook,
    Critic,
    Deformed,
    DepthWise,
    Dilated,
    FourierOperator,
    Patches,
    Pyramid,
    Video,
    Windows,
)
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
from benchmarks.planner.zoo.others import (
    Coordinates,
    Ensemble,
    Flow,
    GraphAttention,
    Pairs,
    Physics,
    PointCloud,
    Quantized,
    Tables,
    Triangles,
)
from benchmarks.planner.zoo.sequences import (
    AttendingCells,
    BiasedTranslator,
    GroupedExperts,
    LinearAttention,
    PackedText,
    Speech,
    StateSpace,
    Tagger,
    Waves,
)

__all__ = ["UNSEEN"]

_SETTINGS = 3


def _films(size: Size, rows: int) -> Batch:
    side = size.data["image"]
    return {"film": torch.randn(rows, 3, size.data["frames"], side, side)}


def _segmented(size: Size, rows: int) -> Batch:
    side = size.data["image"]
    return {**images(size, rows), "classes": torch.randint(21, (rows, side, side))}


def _spoken(size: Size, rows: int) -> Batch:
    length, letters = size.data["length"], size.data["letters"]
    return {
        "sound": torch.randn(rows, length, 80),
        "lengths": torch.randint(length // 2, length + 1, (rows,)),
        "letters": torch.randint(1, 64, (rows, letters)),
        "count": torch.randint(letters // 2, letters + 1, (rows,)),
    }


def _levels(size: Size, rows: int) -> Batch:
    return {"levels": torch.randint(256, (rows, size.data["length"]))}


def _series(size: Size, rows: int) -> Batch:
    return {"series": torch.randn(rows, size.data["length"], size.net["width"])}


def _clouds(size: Size, rows: int) -> Batch:
    return {"points": torch.randn(rows, size.data["points"], 3), "label": torch.randint(100, (rows,))}


def _clicks(size: Size, rows: int) -> Batch:
    fields, entries = size.net["fields"], size.net["entries"]
    return {
        "numbers": torch.randn(rows, 13),
        "chosen": torch.randint(entries, (rows, fields, size.data["each"])),
        "clicked": torch.randint(2, (rows,)).float(),
    }


def _rays(_: Size, rows: int) -> Batch:
    return {"origin": torch.randn(rows, 3), "direction": torch.randn(rows, 3), "color": torch.rand(rows, 3)}


def _places(_: Size, rows: int) -> Batch:
    return {"place": torch.rand(rows, 2)}


def _views(size: Size, rows: int) -> Batch:
    return {"one": vectors(size, rows)["x"], "other": vectors(size, rows)["x"]}


def _residues(size: Size, rows: int) -> Batch:
    length = size.data["length"]
    return {"residues": torch.randn(rows, length, 8), "distance": torch.randint(32, (rows, length, length))}


def _kind(
    name: str,
    net: Callable[..., Any],
    rows: Callable[[Size, int], Batch],
    *,
    cpu: Size,
    cuda: Size,
    needs: Callable[[], bool] = lambda: True,
    is_transformer: bool = False,
) -> Kind:
    return Kind(
        name=name,
        net=net,
        rows=rows,
        cpu=cpu,
        cuda=cuda,
        needs=needs,
        is_transformer=is_transformer,
        has_blocks=False,
        settings=_SETTINGS,
    )


def _recurrent(name: str, net: Callable[..., Any], rows: Callable[[Size, int], Batch], **sizes: Any) -> Kind:
    """Return a kind that reads tokens in both its sizes."""
    length = {"length": 65}, {"length": 257}
    net_sizes: tuple[Mapping[str, Any], ...] = (
        {"vocabulary": 2000, "width": 128},
        {"vocabulary": 16_000, "width": 512},
    )
    cpu, cuda = (
        size_of(count, data, **base, **sizes)
        for count, data, base in zip(((6, 16), (64, 160)), length, net_sizes, strict=True)
    )
    return _kind(name, net, rows, cpu=cpu, cuda=cuda)


def _text_sized(name: str, net: Callable[..., Any], **sizes: Any) -> Kind:
    cpu = size_of((6, 16), {"length": 65}, vocabulary=2000, width=128, length=65, **sizes)
    cuda = size_of((64, 160), {"length": 257}, vocabulary=16_000, width=512, length=257, **sizes)
    return _kind(name, net, texts, cpu=cpu, cuda=cuda)


UNSEEN = (
    _kind("relative biases", BiasedTranslator, pairs, is_transformer=True,
          cpu=size_of((3, 8), {"length": 65}, vocabulary=2000, width=128, depth=2),
          cuda=size_of((16, 40), {"length": 257}, vocabulary=16_000, width=512, depth=4)),
    _kind("t5 (transformers)", Translation, pairs, is_transformer=True, needs=has_transformers,
          cpu=size_of((3, 8), {"length": 65}, vocabulary=2000, width=128, depth=2),
          cuda=size_of((16, 40), {"length": 256}, vocabulary=16_000, width=512, depth=4)),
    _kind("shifted windows", Windows, labelled_images, is_transformer=True,
          cpu=size_of((2, 6), {"image": 112}, width=64, depth=2),
          cuda=size_of((32, 80), {"image": 224}, width=96, depth=2)),
    _kind("vision transformer", Patches, labelled_images, is_transformer=True,
          cpu=size_of((3, 8), {"image": 96}, width=128, depth=3, image=96),
          cuda=size_of((64, 160), {"image": 224}, width=384, depth=6, image=224)),
    _kind("speech, ctc", Speech, _spoken, is_transformer=True,
          cpu=size_of((2, 5), {"length": 200, "letters": 12}, width=128, depth=2),
          cuda=size_of((16, 40), {"length": 800, "letters": 48}, width=256, depth=4)),
    _kind("grouped experts", GroupedExperts, tokens, is_transformer=True,
          cpu=size_of((2, 6), {"length": 97}, vocabulary=2000, width=128, depth=2, experts=4),
          cuda=size_of((16, 40), {"length": 513}, vocabulary=16_000, width=512, depth=4, experts=8)),
    _kind("mixtral (transformers)", Experts, tokens, is_transformer=True, needs=has_transformers,
          cpu=size_of((2, 6), {"length": 96}, vocabulary=2000, width=128, depth=2, experts=4),
          cuda=size_of((8, 20), {"length": 512}, vocabulary=16_000, width=512, depth=4, experts=8)),
    _kind("state space, at once", StateSpace, tokens,
          cpu=size_of((2, 6), {"length": 65}, vocabulary=2000, width=96, depth=2),
          cuda=size_of((8, 20), {"length": 257}, vocabulary=16_000, width=256, depth=3)),
    _kind("state space, in steps", StateSpace, tokens,
          cpu=size_of((2, 6), {"length": 33}, vocabulary=2000, width=96, depth=2, loops=True),
          cuda=size_of((16, 40), {"length": 65}, vocabulary=16_000, width=256, depth=2, loops=True)),
    _kind("linear attention", LinearAttention, _series, is_transformer=True,
          cpu=size_of((2, 6), {"length": 65}, width=64, depth=2),
          cuda=size_of((8, 20), {"length": 257}, width=256, depth=3)),
    _kind("waves", Waves, _levels,
          cpu=size_of((2, 6), {"length": 1025}, width=32, depth=8),
          cuda=size_of((16, 40), {"length": 8193}, width=64, depth=10)),
    _recurrent("lstm, both ways", Tagger, tokens, cell="lstm", depth=2),
    _recurrent("gru, both ways", Tagger, tokens, cell="gru", depth=2),
    _recurrent("rnn, both ways", Tagger, tokens, cell="rnn", depth=2),
    _recurrent("lstm, projected", Tagger, tokens, cell="lstm", depth=1, projects=64),
    _text_sized("gru, packed", PackedText, depth=2),
    _recurrent("cells with attention", AttendingCells, pairs),
    _kind("dilated", Dilated, _segmented,
          cpu=size_of((2, 5), {"image": 96}, width=32, depth=3),
          cuda=size_of((16, 40), {"image": 256}, width=128, depth=3)),
    _kind("video", Video, _films,
          cpu=size_of((2, 5), {"image": 32, "frames": 8}, width=16, depth=2),
          cuda=size_of((8, 20), {"image": 112, "frames": 16}, width=64, depth=3)),
    _kind("depth-wise", DepthWise, labelled_images,
          cpu=size_of((3, 8), {"image": 64}, width=24, depth=6),
          cuda=size_of((64, 160), {"image": 224}, width=48, depth=9)),
    _kind("variational autoencoder", Autoencoder, images,
          cpu=size_of((6, 16), {"image": 64}, width=32, image=64),
          cuda=size_of((64, 160), {"image": 128}, width=64, image=128)),
    _kind("codebook", Codebook, images,
          cpu=size_of((3, 8), {"image": 64}, width=64, codes=256),
          cuda=size_of((32, 80), {"image": 128}, width=128, codes=1024)),
    _kind("critic, gradient penalty", Critic, images,
          cpu=size_of((3, 8), {"image": 64}, width=32, depth=3),
          cuda=size_of((32, 80), {"image": 128}, width=64, depth=4)),
    _kind("deformed", Deformed, labelled_images,
          cpu=size_of((3, 8), {"image": 64}, width=32, depth=3),
          cuda=size_of((32, 80), {"image": 160}, width=64, depth=4)),
    _kind("fourier operator", FourierOperator, images,
          cpu=size_of((3, 8), {"image": 64}, width=24, depth=3, modes=12),
          cuda=size_of((32, 80), {"image": 128}, width=48, depth=4, modes=24)),
    _kind("pyramid", Pyramid, labelled_images,
          cpu=size_of((3, 8), {"image": 64}, width=64, levels=4),
          cuda=size_of((32, 80), {"image": 256}, width=128, levels=4)),
    _kind("graph attention", GraphAttention, graphs,
          cpu=size_of((12, 40), {"nodes": 200, "edges": 1600}, features=32, width=64, depth=3),
          cuda=size_of((4, 9), {"nodes": 10_000, "edges": 80_000}, features=64, width=128, depth=4)),
    _kind("point cloud", PointCloud, _clouds,
          cpu=size_of((3, 8), {"points": 128}, width=64, depth=3, near=8),
          cuda=size_of((16, 40), {"points": 1024}, width=128, depth=3, near=20)),
    _kind("tables", Tables, _clicks,
          cpu=size_of((512, 1500), {"each": 4}, fields=6, entries=5000, width=32),
          cuda=size_of((16_384, 40_000), {"each": 8}, fields=12, entries=100_000, width=64)),
    _kind("coordinates", Coordinates, _rays,
          cpu=size_of((64, 160), width=128, depth=4, samples=32),
          cuda=size_of((2048, 5000), width=256, depth=6, samples=64)),
    _kind("physics", Physics, _places,
          cpu=size_of((2000, 6000), width=64, depth=4),
          cuda=size_of((50_000, 120_000), width=256, depth=5)),
    _kind("pairs", Pairs, _views,
          cpu=size_of((256, 600), width=256, depth=3),
          cuda=size_of((2048, 5000), width=2048, depth=4)),
    _kind("triangles", Triangles, _residues,
          cpu=size_of((2, 5), {"length": 32}, width=32, depth=2),
          cuda=size_of((4, 9), {"length": 128}, width=64, depth=3)),
    _kind("quantized", Quantized, vectors,
          cpu=size_of((384, 1000), width=512, depth=4),
          cuda=size_of((4096, 10_000), width=4096, depth=4)),
    _kind("ensemble", Ensemble, vectors,
          cpu=size_of((384, 1000), width=128, members=8),
          cuda=size_of((4096, 10_000), width=1024, members=8)),
    _kind("flow", Flow, vectors,
          cpu=size_of((384, 1000), width=64, depth=4),
          cuda=size_of((8192, 20_000), width=512, depth=8)),
)  # fmt: skip
