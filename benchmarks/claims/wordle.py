"""The memory that seed 003 ascribes to its tuning, beside predictions for both steps.

Usage: python -m benchmarks.claims.wordle

The steps are those of `experiment=wordle-seed-before` and `wordle-seed-after`, in float32 as the seed ran: Qwen2.5-3B's shape with adapters,
prompts of 256 tokens, predicted for MPS by dry runs. No weights are read, and nothing ran on a Mac.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import lightning_unified
from benchmarks.records import record_measures
from lightning_unified.models.wordle import Wordle

PROMPT, LAYERS, WIDTH = 256, 36, 2560  # the seed's own width; Qwen2.5-3B is 2048 wide


def hidden_states() -> dict[str, Any]:
    """Return the bytes of one hidden vector per new token and layer, which is the seed's sum."""
    return {
        name: rows * new * WIDTH * LAYERS * 4
        for name, rows, new in (("before: 2 x 512", 2, 512), ("after: 1 x 128", 1, 128))
    }


def predicted_steps() -> dict[str, Any]:
    """Return the predicted peak of both steps on MPS by category, in bytes."""
    before = _predicted(new=512, micro_batch_size=2, recompute=False)
    return {"before: 2 x 512": before, "after: 1 x 128": _predicted(new=128, micro_batch_size=1, recompute=True)}


def _predicted(*, new: int, micro_batch_size: int, recompute: bool) -> dict[str, Any]:
    with torch.device("meta"):
        module = Wordle(
            preset="wordle-qwen2_5_3b",
            lora_rank=16,
            lora_alpha=32.0,
            lora_dropout=0.05,
            group_size=2,
            max_new_tokens=new,
        )
    prompts = {
        "prompt": torch.zeros(1, PROMPT, dtype=torch.int64),
        "prompt_mask": torch.ones(1, PROMPT, dtype=torch.bool),
        "example": torch.zeros(1, dtype=torch.int64),
    }
    found = lightning_unified.predict(
        module, module.largest_batch(prompts), device="mps", micro_batch_size=micro_batch_size, recompute=recompute
    )
    return {
        "peak": found.peak_bytes,
        "reserved": found.reserved_bytes,
        "activations": found.categories.get("activations", 0),
        "weights": found.categories["weights"],
    }


if __name__ == "__main__":
    sys.exit(record_measures("claims.wordle", Path(__file__), (hidden_states, predicted_steps)))
