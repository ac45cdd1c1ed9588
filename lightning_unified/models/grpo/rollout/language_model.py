"""Access to the causal language model inside a wrapper, and its state while it samples."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["blocks_of", "causal_lm", "forward_last", "sampling"]


def causal_lm(model: nn.Module) -> Any:
    """Return the transformers model inside `model`.

    Its layers keep peft's adapters if there are any.

    Raises:
        ValueError: If it has no output embeddings, or its adapter adds tokens before the prompt.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} learns a prompt (prefix or prompt tuning), which the rollout does not know; use LoRA."
        )
    lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not callable(getattr(lm, "get_output_embeddings", None)) or lm.get_output_embeddings() is None:
        raise ValueError(
            f"{type(lm).__name__} is no causal language model of transformers: it has no output embeddings. Give one of the "
            "classes called …ForCausalLM, bare or wrapped by peft."
        )
    return lm


def forward_last(lm: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """Return the logits (N, V) after the last token and the model's cache."""
    if "logits_to_keep" in inspect.signature(type(lm).forward).parameters:
        inputs["logits_to_keep"] = 1
    output = lm(**inputs, use_cache=True, return_dict=True)
    return output.logits[:, -1], output.past_key_values


def blocks_of(lm: nn.Module) -> list[nn.Module]:
    """Return the blocks in running order: the longest list of modules of one class."""
    lists = [list(module) for module in lm.modules() if isinstance(module, nn.ModuleList)]
    return max((blocks for blocks in lists if len({type(block) for block in blocks}) == 1), key=len, default=[])


@contextmanager
def sampling(model: nn.Module) -> Iterator[None]:
    """Switch off dropout, recomputation and gradients; restore every module's mode afterwards.

    Recomputation, by transformers or this project, is active in train mode only, so eval mode switches it off.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
