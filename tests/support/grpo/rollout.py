"""Tiny language models to sample from, prompts, and reference log-probabilities.

A plain forward pass gives the log-probabilities.
"""

import pytest
import torch
from torch import Tensor

from lightning_unified.models.grpo.rollout import SamplingOptions

VOCABULARY = 61
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}


def language_model(kind="Qwen2", *, adapters=False, device="cpu", dtype=torch.float32, **changes):
    """Return a model in train mode.

    Its adapters, if there are any, are far from zero and have dropout.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, dtype)
    if adapters:
        peft = pytest.importorskip("peft")
        chosen = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            lora_dropout=0.5,
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, chosen)
    return model.train()


def prompts(count=3, *, length=7, device="cpu"):
    """Return prompts of several lengths, with pads on the left."""
    ids = torch.randint(2, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(length) >= torch.arange(count)[:, None] % length
    return (ids * mask).to(device), mask.to(device)


@torch.no_grad()
def recomputed(model, prompt, mask, completions, *, group=1, temperature=1.0) -> Tensor:
    """Return the completions' log-probabilities (N, T) from one forward pass over everything.

    The model runs in evaluation mode.
    """
    ids = torch.cat([prompt.repeat_interleave(group, 0), completions.ids], dim=1)
    there = torch.cat([mask.repeat_interleave(group, 0), completions.mask], dim=1).long()
    was = model.training
    model.eval()
    logits = model(
        input_ids=ids, attention_mask=there, position_ids=(there.cumsum(1) - 1).clamp(min=0), use_cache=False
    ).logits
    model.train(was)
    logits = logits[:, prompt.shape[1] - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, completions.ids[..., None])[..., 0] * completions.mask


@torch.no_grad()
def generated(model, prompt, mask, *, new) -> Tensor:
    """Return the tokens that transformers' own greedy generation appends."""
    was = model.training
    model.eval()
    ids = model.generate(
        input_ids=prompt, attention_mask=mask.long(), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    model.train(was)
    return ids[:, prompt.shape[1] :]


def options(group, new, **changes):
    """Return the options of `group` completions of at most `new` tokens."""
    return SamplingOptions(group_size=group, max_new_tokens=new, **changes)


def seeded(seed=0, *, device="cpu"):
    return torch.Generator(device).manual_seed(seed)
