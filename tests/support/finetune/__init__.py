"""A small model and a few conversations to fine-tune it on."""

import json

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_unified.models.finetune import Finetune, FinetuneData

TINY = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {"vocab_size": 320, "sequence_length": 96, "batch_size": 4, "val_fraction": 0.2}


def conversations(count=9):
    """Return conversations of one or two answers of several lengths."""
    found = []
    for number in range(count):
        turns = [{"role": "user", "content": f"What is {number} plus {number}?"}]
        turns.append({"role": "assistant", "content": f"It is {2 * number}." * (1 + number % 3)})
        if number % 2:
            turns += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes, " * (number % 4) + "yes."},
            ]
        found.append(turns)
    return found


def write_rows(path, rows):
    """Write a `.jsonl` file, and return its path as text."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def chats(folder, count=9):
    """Write conversations to a file, and return its path as text."""
    return write_rows(folder / "chats.jsonl", [{"messages": turns} for turns in conversations(count)])


def data(path, **changes):
    return FinetuneData(path=path, **{**SIZES, **changes})


def build(*, seed=0, **changes):
    pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return Finetune(**{"architecture": TINY, "lora_rank": None, "warmup_steps": 0, "schedule": "constant", **changes})


def fit(module, datamodule, folder, *callbacks, steps=1, strategy="auto", resume=None, **settings):
    trainer = Trainer(
        **{
            "default_root_dir": folder, "max_steps": steps, "accelerator": "cpu", "strategy": strategy, "logger": False,
            "limit_val_batches": 0, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
            "callbacks": list(callbacks), **settings,
        }
    )  # fmt: skip
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume, weights_only=False)
    return trainer
