"""Predicted and counted peaks of attention on a simulated Mac, by size and model.

Each run trains three steps of a small model on the simulated machine m2-16gb, whose allocator is that of the installed torch. The ratio of the
predicted to the counted peak is recorded. Nothing runs on a Mac.

Usage: python -m benchmarks.options.attention.attention_peaks
       (writes benchmarks/options/attention/attention_peaks.json; two minutes on one idle core)
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import Plan, UnifiedStrategy
from lightning_unified.step.recovery import cache_care

RESULTS = Path(__file__).with_suffix(".json")
MACHINE, BUDGET, STEPS = "m2-16gb", "400MiB", 3
WORDS = 500


class Planned(L.LightningModule):
    """Keeps the plan of its last step."""

    plan: Plan | None = None

    @override
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.plan = getattr(self.trainer.strategy, "plan", None)  # a dry run has none

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    @staticmethod
    def data(count: int, length: int, width: int) -> Tensor:
        """Return `count` rows."""
        raise NotImplementedError


class Language(Planned):
    """A model of Qwen2's kind; rows of tokens."""

    def __init__(self, *, layers: int, heads: int, width: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, Qwen2Config

        config = Qwen2Config(
            vocab_size=WORDS, hidden_size=width, num_hidden_layers=layers, intermediate_size=2 * width, num_attention_heads=heads,
            num_key_value_heads=heads // 2, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.net = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    @staticmethod
    @override
    def data(count: int, length: int, width: int) -> Tensor:
        return torch.randint(WORDS, (count, length))


class Encoder(Planned):
    """`nn.TransformerEncoder`; rows of vectors."""

    def __init__(self, *, layers: int, heads: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.net, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(width, 10)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch)).square().mean()

    @staticmethod
    @override
    def data(count: int, length: int, width: int) -> Tensor:
        return torch.randn(count, length, width)


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.outputs(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Vision(Planned):
    """A vision transformer; square images of `length` patches."""

    def __init__(self, *, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 8, 8), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        features = self.blocks(self.patches(batch).flatten(2).transpose(1, 2)).mean(1)
        return F.cross_entropy(self.head(features), torch.zeros(len(batch), dtype=torch.long, device=self.device))

    @staticmethod
    @override
    def data(count: int, length: int, width: int) -> Tensor:
        side = 8 * math.isqrt(length)
        return torch.randn(count, 3, side, side)


KINDS: dict[str, type["Planned"]] = {"language": Language, "encoder": Encoder, "vision": Vision}
SIZES = [
    (2, 4, 64, 2, 256),
    (6, 8, 64, 2, 256),
    (3, 4, 64, 4, 144),
    (4, 4, 128, 1, 484),
    (2, 2, 32, 3, 400),
    (5, 4, 64, 3, 400),
]
"""Layers, heads, width, rows, length."""


def peaks(kind: str, sizes: tuple[int, int, int, int, int], *, attention: str, recompute: bool) -> tuple[int, int]:
    """Train three steps of whole batches; return the predicted and the counted peak in bytes.

    Caches are not cleared meanwhile: the strategy clears them by the clock, and Metal's reuse of blocks depends on it.
    """
    layers, heads, width, rows, length = sizes
    torch.manual_seed(0)
    module = KINDS[kind](layers=layers, heads=heads, width=width)
    options: Any = {"attention": attention, "recompute": recompute}
    strategy = UnifiedStrategy(simulate=MACHINE, budget=BUDGET, **options)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = module.data(STEPS * rows, length, width)
    with mock.patch.object(cache_care, "_EVERY_S", math.inf):
        trainer.fit(module, DataLoader(data, rows))
    found, machine = module.plan, strategy.simulated
    assert found is not None
    assert found.prediction is not None
    assert machine is not None
    assert (found.micro_batch_size, found.attention) == (rows, None if attention == "torch" else attention)
    return found.prediction.peak_bytes, machine.allocator.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("attention-peaks")
    record = origin("python -m benchmarks.options.attention.attention_peaks")
    record |= {"simulated": MACHINE, "budget": BUDGET, "steps": STEPS, "runs": []}
    table: dict[str, dict[str, str]] = {}
    for kind, attention, recompute in itertools.product(KINDS, ("torch", "chunked"), (False, True)):
        ratios = []
        for sizes in SIZES:
            predicted, counted = peaks(kind, sizes, attention=attention, recompute=recompute)
            ratios.append(predicted / counted)
            cell = dict(zip(("layers", "heads", "width", "rows", "length"), sizes, strict=True))
            options = {"model": kind, "attention": attention, "recompute": recompute}
            record["runs"].append(options | cell | {"predicted": predicted, "counted": counted, "ratio": ratios[-1]})
        row = f"{kind}, {attention}, {'recomputed' if recompute else 'plain'}"
        table[row] = {"least": f"{min(ratios):.4f}", "most": f"{max(ratios):.4f}"}
        write(record, arguments.output)
    print(markdown(table, first="model"))


if __name__ == "__main__":
    main()
