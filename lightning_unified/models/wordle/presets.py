"""Named language models for Wordle, with their sources and sizes, which suffice for a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_unified.models.choices import check_choice

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        pretrained: Source of the weights for `models.grpo.policy.find_policy`; None for random ones.
        architecture: A transformers configuration as plain data.
        parameters: Number of parameters, tied ones counted once.
        purpose: Intended use.
    """

    pretrained: str | None
    architecture: Mapping[str, Any]
    parameters: int
    purpose: str


PRESETS: dict[str, Preset] = {
    "wordle-tiny": Preset(
        pretrained=None,
        architecture={
            "model_type": "llama", "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        parameters=99_648,
        purpose="seconds on two cores: for trying things out, not for results",
    ),
    "wordle": Preset(
        pretrained="smollm2-135m",
        architecture={
            "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        parameters=134_515_008,
        purpose="SmolLM2-135M-Instruct, which a laptop trains",
    ),
    "wordle-qwen2_5_0_5b": Preset(
        pretrained="Qwen/Qwen2.5-0.5B-Instruct",
        architecture={
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        parameters=494_032_768,
        purpose="Qwen2.5-0.5B-Instruct, for users with its weights and 16 GB",
    ),
    "wordle-qwen2_5_3b": Preset(
        pretrained="Qwen/Qwen2.5-3B-Instruct",
        architecture={
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        parameters=3_085_938_688,
        purpose="Qwen2.5-3B-Instruct, for users with its weights",
    ),
}  # fmt: skip


def preset(name: str) -> Preset:
    """Return the preset called `name`.

    Raises:
        ValueError: If there is no such preset.
    """
    check_choice("preset", name, PRESETS)
    return PRESETS[name]
