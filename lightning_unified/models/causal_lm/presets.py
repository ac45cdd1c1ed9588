"""Named causal language models: sources and sizes, which suffice for a plan.

The sizes are those of each model's published `config.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MODELS", "Preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        pretrained: Source of the weights for `causal_lm.weights.find_language_model`; None for random ones.
        architecture: A transformers configuration as plain data.
        parameters: Number of parameters, tied ones counted once.
        purpose: Intended use.
    """

    pretrained: str | None
    architecture: Mapping[str, Any]
    parameters: int
    purpose: str


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


def _smollm2(width: int, inner: int, *, layers: int, heads: int, kv_heads: int, theta: float) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": _rope(theta),
    }  # fmt: skip


def _qwen2_5(width: int, inner: int, *, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "rope_parameters": _rope(1_000_000.0),
    }  # fmt: skip


def _qwen3(width: int, inner: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_parameters": _rope(1_000_000.0),
    }  # fmt: skip


def _llama3_2(width: int, *, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": width, "intermediate_size": 8192, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": _rope(500_000.0, **scaling) | {"rope_type": "llama3"},
    }  # fmt: skip


_GEMMA3_1B: Mapping[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
    "sliding_window": 512, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    "rope_parameters": {"full_attention": _rope(1_000_000.0), "sliding_attention": _rope(10_000.0)},
}  # fmt: skip


def _preset(source: str, architecture: Mapping[str, Any], parameters: int, *, purpose: str = "") -> Preset:
    name = source.rpartition("/")[2]
    text = purpose or f"{name}, for users with its weights"
    return Preset(pretrained=source, architecture=architecture, parameters=parameters, purpose=text)


MODELS: Mapping[str, Preset] = {
    "smollm2_135m": _preset(
        "smollm2-135m", _smollm2(576, 1536, layers=30, heads=9, kv_heads=3, theta=100_000.0), 134_515_008,
        purpose="SmolLM2-135M-Instruct, which a laptop trains",
    ),
    "smollm2_360m": _preset(
        "HuggingFaceTB/SmolLM2-360M-Instruct", _smollm2(960, 2560, layers=32, heads=15, kv_heads=5, theta=100_000.0), 361_821_120
    ),
    "smollm2_1_7b": _preset(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", _smollm2(2048, 8192, layers=24, heads=32, kv_heads=32, theta=130_000.0), 1_711_376_384
    ),
    "qwen2_5_0_5b": _preset(
        "Qwen/Qwen2.5-0.5B-Instruct", _qwen2_5(896, 4864, layers=24, heads=14, kv_heads=2), 494_032_768,
        purpose="Qwen2.5-0.5B-Instruct, for users with its weights and 16 GB",
    ),
    "qwen2_5_1_5b": _preset("Qwen/Qwen2.5-1.5B-Instruct", _qwen2_5(1536, 8960, layers=28, heads=12, kv_heads=2), 1_543_714_304),
    "qwen2_5_3b": _preset("Qwen/Qwen2.5-3B-Instruct", _qwen2_5(2048, 11_008, layers=36, heads=16, kv_heads=2), 3_085_938_688),
    "qwen3_0_6b": _preset("Qwen/Qwen3-0.6B", _qwen3(1024, 3072), 596_049_920),
    "qwen3_1_7b": _preset("Qwen/Qwen3-1.7B", _qwen3(2048, 6144), 1_720_574_976),
    "llama3_2_1b": _preset("meta-llama/Llama-3.2-1B-Instruct", _llama3_2(2048, layers=16, heads=32, head_dim=64), 1_235_814_400),
    "llama3_2_3b": _preset("meta-llama/Llama-3.2-3B-Instruct", _llama3_2(3072, layers=28, heads=24, head_dim=128), 3_212_749_824),
    "gemma3_1b": _preset("google/gemma-3-1b-it", _GEMMA3_1B, 999_885_952),
}  # fmt: skip
"""The models, by name."""
