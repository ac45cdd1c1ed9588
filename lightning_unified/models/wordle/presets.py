"""Named language models for Wordle."""

from lightning_unified.models.causal_lm.presets import MODELS, Preset

__all__ = ["PRESETS"]

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
    "wordle": MODELS["smollm2_135m"],
    "wordle-qwen2_5_0_5b": MODELS["qwen2_5_0_5b"],
    "wordle-qwen2_5_3b": MODELS["qwen2_5_3b"],
}  # fmt: skip
