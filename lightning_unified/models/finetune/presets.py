"""Named language models for fine-tuning."""

from collections.abc import Mapping

from lightning_unified.models.causal_lm.presets import MODELS, Preset

__all__ = ["PRESETS"]

PRESETS: Mapping[str, Preset] = {
    "finetune-tiny": Preset(
        pretrained=None,
        architecture={
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        parameters=106_816,
        purpose="seconds on two cores: for trying things out, not for results",
    ),
    **MODELS,
}  # fmt: skip
"""A tiny model of random weights, and all of `causal_lm.presets.MODELS`."""
