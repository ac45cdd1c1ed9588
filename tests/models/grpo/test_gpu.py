"""GRPO on a GPU: memory left by sampling.

The sampling weights are the trained ones.
"""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.models.grpo import GRPO
from tests.support.grpo.training import Task, decode, fit, prompts

pytestmark = pytest.mark.gpu


def _module(**options):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    model = transformers.Qwen2ForCausalLM(config).bfloat16().requires_grad_(False)
    chosen = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    peft.inject_adapter_in_model(chosen, model.model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    settings = {"group_size": 8, "max_new_tokens": 512, "temperature": 0.7, "stop_ids": [0], "learning_rate": 1e-3}
    return GRPO(model, task=Task(), decode=decode, **{**settings, **options})


def test_the_cache_is_gone_before_the_loss_pass():
    module = _module().cuda()
    batch = {name: value.cuda() for name, value in prompts().items()}
    module.prepare_batch(batch)  # code and workspaces are loaded
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    found = module.prepare_batch(batch)
    made = sum(value.nbytes for value in found.values() if isinstance(value, torch.Tensor))
    cache = 2 * 4 * 2 * 64 * 32 * 512 * 2  # of all layers, heads, rows and tokens
    assert torch.cuda.memory_allocated() - before < made + cache // 8


def test_what_is_trained_was_sampled_from():
    module = _module(beta=0.1)
    loader = DataLoader([prompts(seed=seed) for seed in range(4)], batch_size=None)
    strategy = UnifiedStrategy(micro_batch_size=12)
    trainer = fit(module, loader, steps=4, strategy=strategy, accelerator="gpu", devices=1, precision="bf16-mixed")
    assert 0 < float(trainer.callback_metrics["train/sampling_gap"]) < 0.1
