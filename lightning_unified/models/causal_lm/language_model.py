"""Access to a causal language model of transformers, and scores without holding all logits."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.nn.token_log_probs import token_log_probs_and_entropy

__all__ = ["causal_lm", "check_head", "decoder_of", "evaluating", "forward_last", "head_of", "score"]

_ROUNDING = 0.05  # judgement: rounding of half-precision logits relative to the largest; a relevant scale or soft cap exceeds it


def causal_lm(model: Any) -> Any:
    """Return the transformers model inside `model`; its layers keep peft's adapters.

    Raises:
        ValueError: If it has no output embeddings, or its adapter adds tokens before the prompt.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} learns a prompt (prefix or prompt tuning), which the rollout does not know; use LoRA."
        )
    lm = _without_wrapper(model)
    if not callable(getattr(lm, "get_output_embeddings", None)) or lm.get_output_embeddings() is None:
        raise ValueError(
            f"{type(lm).__name__} is no causal language model of transformers: it has no output embeddings. Give one of the "
            "classes called …ForCausalLM, bare or wrapped by peft."
        )
    return lm


def decoder_of(model: Any) -> nn.Module:
    """Return the module that computes hidden states, adapters included, also inside a wrapper."""
    return _without_wrapper(model).get_decoder()


def _without_wrapper(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Tensor:
    """Return the weight (V, D) of the model's output layer.

    Raises:
        ValueError: If it is not a plain linear layer without a bias, for example because it has an adapter.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.bias is None:
        return head.weight
    found = "none" if head is None else f"a {type(head).__name__}"
    with_bias = " with a bias" if isinstance(head, nn.Linear) else ""
    raise ValueError(
        f"log-probabilities are computed in chunks from the weight of the output layer, and {type(model).__name__} has "
        f"{found}{with_bias}; leave lm_head out of lora_targets, or take a model whose head is a plain linear layer."
    )


@torch.no_grad()
def check_head(model: Any) -> None:
    """Check that the model's logits are its hidden states times its head.

    With a soft cap or a scale in between, training would change another policy than the one sampled.

    Raises:
        ValueError: If they differ.
    """
    weight = head_of(model)
    ids = torch.arange(2, device=weight.device)[None] % len(weight)
    with evaluating(model):
        logits = model(input_ids=ids, use_cache=False).logits.float()
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    own = (hidden @ weight.to(hidden.dtype).T).float()
    differs = float((own - logits).abs().max()) > _ROUNDING * float(logits.abs().max().clamp(min=1e-3))
    # an untrained model's logits are far below a cap, so the comparison cannot show it
    if differs or getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None:
        raise ValueError(
            f"the logits of {type(model).__name__} are not its last hidden states times the weight of its head (a soft cap or a scale is in "
            "between), which a loss in chunks takes them for; use a model without it."
        )


def score(
    model: Any, tokens: Tensor, *, start: Tensor, chosen: Tensor, temperature: float, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `chosen` and the entropies at the same positions.

    Sequences are read from position 0 by causal attention without a mask: pads at the end change nothing before them. The entropies
    have no gradient.

    Shapes:
        tokens (R, S), start (R), chosen (R, T); both results (R, T).

    Args:
        model: A causal language model of transformers, bare or wrapped by peft.
        tokens: Token ids.
        start: Position of each row's first chosen token, 1 or more; T tokens from there are scored.
        chosen: The tokens; arbitrary at pads.
        temperature: Divisor of the logits.
        chunk: See `token_log_probs`.
    """
    hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    places = start[:, None] - 1 + torch.arange(chosen.shape[1], device=tokens.device)
    places = places.clamp(0, tokens.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    log_probs, entropy = token_log_probs_and_entropy(
        hidden.gather(1, places).flatten(0, 1), head_of(model), chosen.flatten(), temperature=temperature, chunk=chunk
    )
    return log_probs.view(chosen.shape), entropy.view(chosen.shape)


def forward_last(lm: Any, **inputs: Any) -> tuple[Tensor, Any]:
    """Return the logits (N, V) after the last token and the model's cache."""
    if "logits_to_keep" in inspect.signature(type(lm).forward).parameters:
        inputs["logits_to_keep"] = 1
    output = lm(**inputs, use_cache=True, return_dict=True)
    return output.logits[:, -1], output.past_key_values


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode inside the context; then restore every submodule's mode.

    This switches off dropout and recomputation. Recomputation, by transformers or this project, is active in train mode only.
    """
    training = [child for child in module.modules() if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True
