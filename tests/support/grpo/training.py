"""A tiny policy, a task of tokens, a sampler that needs no model, and runs of them."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_unified.models.grpo import GRPO
from lightning_unified.models.grpo.rollout import Completions

VOCABULARY, PROMPTS, LENGTH, GROUP, LONGEST = 61, 4, 6, 4, 7
TEMPERATURE = 0.7


class Task:
    """Rewards a completion by the sum of its ids; every third prompt gets no reward."""

    stop = ""

    def __init__(self):
        self.steps = []

    def rewards(self, examples, completions, *, step=0):
        self.steps.append(step)
        sums = torch.tensor([sum(map(int, text.split())) for text in completions], dtype=torch.float64)
        even = (sums % 2).where(examples.cpu() % 3 != 2, 0.0)
        small = (sums % 7 / 10).where(examples.cpu() % 3 != 2, 0.0)
        return {"even": even, "small": small, "total": even + small}


class Dice:
    """Returns other completions of random ids and lengths in each call; `calls` counts them."""

    def __init__(self, seed=0):
        self.generator, self.calls, self.given = torch.Generator().manual_seed(seed), 0, []

    def __call__(self, prompt, prompt_mask, options):
        self.calls += 1
        rows = len(prompt) * options.group_size
        lengths = torch.randint(1, options.max_new_tokens, (rows,), generator=self.generator)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.randint(VOCABULARY, mask.shape, generator=self.generator) * mask
        ended = lengths < options.max_new_tokens
        found = Completions(ids=ids, mask=mask, log_probs=-torch.ones(ids.shape), ended=ended)
        self.given.append((prompt, prompt_mask, found))
        return found


def decode(ids):
    return " ".join(map(str, ids))


def policy(*, adapters=False, seed=0, dropout=0.0, layers=2):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        attention_dropout=dropout,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    if adapters:
        peft = pytest.importorskip("peft")
        chosen = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=dropout
        )
        for parameter in model.parameters():
            parameter.requires_grad = False
        peft.inject_adapter_in_model(chosen, model.model)
    return model


def prompts(*, first=0, seed=0):
    """A batch of prompts of 1 to LENGTH tokens, pads on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (PROMPTS, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 1, 3, 4])[:, None]
    mask = torch.arange(LENGTH) >= LENGTH - lengths
    return {"prompt": ids * mask, "prompt_mask": mask, "example": torch.arange(first, first + PROMPTS)}


def traces(*, seed=1):
    """A supervised batch: prompts and answers of several lengths, pads on the right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
    begins, ends = torch.tensor([[2], [5], [1], [4]]), torch.tensor([[5], [9], [8], [6]])
    places = torch.arange(9)
    return {"tokens": tokens, "labels": tokens.where((places >= begins) & (places < ends), -100)}


class Gradients(Callback):
    """Records every step's gradients."""

    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps.append(
            {name: one.grad.clone() for name, one in pl_module.policy.named_parameters() if one.grad is not None}
        )


def fit(module, batches, *, steps, strategy="auto", callbacks=(), ckpt_path=None, val=None, **options):
    """Return the Trainer after `steps` optimizer steps in float64 on the CPU."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        max_steps=steps,
        strategy=strategy,
        callbacks=list(callbacks),
        **{"accelerator": "cpu", "precision": "64-true", **quiet, **options},
    )
    trainer.fit(module, batches, val, ckpt_path=ckpt_path, weights_only=None)
    return trainer


def grpo(model=None, **options):
    settings = {"sampler": Dice(), "group_size": GROUP, "max_new_tokens": LONGEST, "temperature": TEMPERATURE}
    settings |= {"learning_rate": 1e-2, "optimizer_kernel": "forloop", **options}
    return GRPO(policy() if model is None else model, task=Task(), decode=decode, **settings)


class Plain:
    """Samples token by token, each sequence separately, directly from the policy."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def __call__(self, prompt, prompt_mask, options):
        rows = [
            row[mask].tolist() for row, mask in zip(prompt, prompt_mask, strict=True) for _ in range(options.group_size)
        ]
        ids, found = (
            torch.zeros(len(rows), options.max_new_tokens, dtype=dtype) for dtype in (torch.int64, torch.float32)
        )
        for place in range(options.max_new_tokens):
            for index, row in enumerate(rows):
                scores = (self.model(input_ids=torch.tensor([row])).logits[0, -1] / TEMPERATURE).log_softmax(-1)
                token = int(scores.exp().multinomial(1))
                ids[index, place], found[index, place] = token, scores[token]
                row.append(token)
        ended = torch.ones(len(rows), dtype=torch.bool)
        return Completions(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool), log_probs=found, ended=ended)
