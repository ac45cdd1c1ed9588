"""Score tokens under a causal language model of transformers, without holding all logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.nn.token_log_probs import token_log_probs_and_entropy

__all__ = ["check_head", "decoder_of", "evaluating", "head_of", "score"]

_ROUNDING = 0.05  # judgement: rounding of half-precision logits relative to the largest; a relevant scale or soft cap exceeds it


def decoder_of(model: Any) -> nn.Module:
    """Return the module that computes hidden states, adapters included.

    The module is found inside peft's wrapper too.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_decoder()


def head_of(model: Any) -> Tensor:
    """Return the weight (V, D) of the model's output layer.

    Raises:
        ValueError: If it is not a plain linear layer without a bias, for example because it has an adapter.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        found = (
            "none"
            if head is None
            else f"a {type(head).__name__}{' with a bias' if isinstance(head, nn.Linear) else ''}"
        )
        raise ValueError(
            f"log-probabilities are computed in chunks from the weight of the output layer, and {type(model).__name__} has {found}; "
            "leave lm_head out of lora_targets, or take a model whose head is a plain linear layer."
        )
    return head.weight


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
            "between), which GRPO's chunked log-probabilities take them for; use a model without it."
        )


def score(
    model: Any, tokens: Tensor, *, start: Tensor, chosen: Tensor, temperature: float, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `chosen` and the entropies, without a gradient.

    The entropies are taken at the positions of `chosen`.

    Sequences are read from position 0 by causal attention without a mask: pads at the end change nothing before them.

    Shapes:
        tokens (R, S), start (R), chosen (R, T); both results (R, T).

    Args:
        model: As `decoder_of` takes it.
        tokens: Token ids.
        start: Position of each row's first chosen token, 1 or more; T tokens from there are scored.
        chosen: The tokens; arbitrary at pads.
        temperature: Logits are divided by it.
        chunk: See `token_log_probs`.
    """
    hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    places = start[:, None] - 1 + torch.arange(chosen.shape[1], device=tokens.device)
    places = places.clamp(0, tokens.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    log_probs, entropy = token_log_probs_and_entropy(
        hidden.gather(1, places).flatten(0, 1), head_of(model), chosen.flatten(), temperature=temperature, chunk=chunk
    )
    return log_probs.view(chosen.shape), entropy.view(chosen.shape)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode inside the context."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
