"""Compare choices of recomputed blocks: the first, the last, or spread.

It also measures the cost of keeping attention outputs.

    python -m benchmarks.options.blocks.recomputed_blocks [--output benchmarks/options/blocks/recomputed_blocks.json]

Peaks are the most that tensors take in a second optimizer step (gradients of the first live in its forward pass, as in Lightning),
from torch's profiler on the CPU, in MiB. Half a minute on one core.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.claims.cpu import highest
from benchmarks.records import record_measures
from lightning_unified.nn.recomputing import Recomputing

DEPTH = 8
MIB = 2**20


class Language(nn.Module):
    """Equal blocks and an output layer over a vocabulary."""

    def __init__(self, vocabulary: int, *, width: int = 64, length: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(DEPTH)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(width, vocabulary)
        self.tokens = torch.randint(vocabulary, (4, length))

    def loss(self) -> Tensor:
        x = self.embedding(self.tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), self.tokens.flatten())


class Images(nn.Module):
    """Blocks with shrinking activations and growing weights, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 16, 16, 32, 32, 64, 64]
        inputs = [3, *widths[:-1]]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(i, o, 3, stride=1 + (i not in (3, o)), padding=1),
                nn.ReLU(),
                nn.Conv2d(o, o, 3, padding=1),
                nn.Tanh(),
            )
            for i, o in zip(inputs, widths, strict=True)
        )
        self.images = torch.randn(8, 3, 64, 64)

    def loss(self) -> Tensor:
        x = self.images
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def first(count: int) -> list[int]:
    return list(range(count))


def last(count: int) -> list[int]:
    return list(range(DEPTH - count, DEPTH))


def spread(count: int) -> list[int]:
    """Evenly, the first among them."""
    return [index * DEPTH // count for index in range(count)] if count else []


CHOICES: dict[str, Callable[[int], list[int]]] = {"first": first, "last": last, "spread": spread}


def peak(module: Language | Images, chosen: Sequence[int], *, keep_attention: bool = False) -> float:
    """Return the peak of a step of `module` with these blocks recomputed, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        with Recomputing([module.blocks[index] for index in chosen], keep_attention=keep_attention):
            for _ in range(2):
                loss = module.loss()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return round(highest(profiler.profiler) / MIB, 2)


def made() -> dict[str, Language | Images]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return {
        "language, small vocabulary": Language(64),
        "language, logits larger than a block": Language(8000),
        "images": Images(),
    }


def which() -> dict[str, object]:
    """Peaks by how many of the 8 blocks are recomputed, and which."""
    return {
        name: {
            str(count): {choice: peak(module, indices(count)) for choice, indices in CHOICES.items()}
            for count in (0, 1, 2, 4, 6, 8)
        }
        for name, module in made().items()
    }


def attention_kept() -> dict[str, object]:
    """Peaks of the first model with nothing recomputed, all but attention's outputs, and all."""
    module = made()["language, small vocabulary"]
    return {
        "none": peak(module, []),
        "all, attention kept": peak(module, range(DEPTH), keep_attention=True),
        "all": peak(module, range(DEPTH)),
    }


if __name__ == "__main__":
    sys.exit(record_measures("options.blocks.recomputed_blocks", Path(__file__), (which, attention_kept)))
