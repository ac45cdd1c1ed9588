"""Hugging Face models of many families with random weights, small enough for a test."""

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")  # a module that imports this one is skipped without it

__all__ = ["FAMILIES", "VOCABULARY", "causal_lm"]

VOCABULARY = 67

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DECODER = {**_SMALL, "num_key_value_heads": 2}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": ("BartConfig", _BART),
    "Bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Cohere": ("CohereConfig", _DECODER),
    "Falcon": ("FalconConfig", _SMALL),
    "GPT2": ("GPT2Config", _GPT2),
    "GPTNeoX": ("GPTNeoXConfig", _SMALL),
    "GPTJ": ("GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "Gemma": ("GemmaConfig", {**_DECODER, "head_dim": 8}),
    "Gemma2": ("Gemma2Config", {**_DECODER, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "Gemma3": ("Gemma3TextConfig", {**_DECODER, "head_dim": 8}),
    "Granite": ("GraniteConfig", {**_DECODER, "logits_scaling": 6.0}),
    "Llama": ("LlamaConfig", {**_DECODER, "tie_word_embeddings": False}),
    "Mistral": ("MistralConfig", _DECODER),
    "Mixtral": ("MixtralConfig", {**_DECODER, "num_local_experts": 2}),
    "OPT": ("OPTConfig", {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Olmo2": ("Olmo2Config", _DECODER),
    "Phi": ("PhiConfig", _SMALL),
    "Phi3": ("Phi3Config", _DECODER),
    "Qwen2": ("Qwen2Config", {**_DECODER, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {**_DECODER, "head_dim": 8}),
    "SmolLM3": ("SmolLM3Config", _DECODER),
    "T5": ("T5Config", {**_T5, "tie_word_embeddings": True}),
}


def causal_lm(family: str, *, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Return a model in train mode without dropout; its output head is new each time.

    `options` replace settings of its family.
    """
    kind, settings = FAMILIES[family]
    config = getattr(transformers, kind)(**{**settings, **options})
    config._experts_implementation = "eager"  # the default one multiplies no float64
    config.use_cache = False
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config).to(dtype).train()
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "attn_pdrop"):
            if isinstance(getattr(child, name, None), float):
                setattr(child, name, 0.0)
    return model
