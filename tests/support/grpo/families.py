"""Tiny language models of families whose caches differ, and the decoding that each needs."""

import torch

from tests.support.grpo.rollout import language_model

OWN_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320, "rotary_dim": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LINEAR = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "static"),
    "Falcon": ({"alibi": True}, "growing"),
    "Bloom": ({**OWN_NAMES, "hidden_size": 32}, "growing"),
    "Mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 320}, "static"),
    "GPTJ": (OWN_NAMES, "static"),
    "Mamba": ({"num_hidden_layers": 2}, "growing"),
    "Mamba2": ({"num_heads": 4, "head_dim": 16, "n_groups": 1}, "growing"),
    "Bamba": ({**MAMBA, "attn_layer_indices": [1]}, "growing"),
    "FalconH1": ({**MAMBA, "mamba_d_ssm": 64}, "growing"),
    "Jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS}, "growing"),
    "Qwen3Next": ({**LINEAR, "layer_types": ["linear_attention", "full_attention"], **EXPERTS}, "growing"),
}


def family(name: str) -> torch.nn.Module:
    return language_model(name, pad_token_id=0, **FAMILIES[name][0])
