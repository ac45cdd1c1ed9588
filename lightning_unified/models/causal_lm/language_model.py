"""Access to a causal language model of transformers, and scores without holding all logits."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.nn.compiled import COMPILED_CALL
from lightning_unified.nn.lazy_logits import LinearLogits, UnknownLogitsError, recorded_logits
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.nn.token_log_probs import token_log_probs_and_entropy

__all__ = [
    "RECURRENT",
    "beyond_rounding",
    "cache_argument",
    "causal_lm",
    "check_head",
    "evaluating",
    "forward_last",
    "head_of",
    "is_recurrent",
    "linear_logits",
    "score",
]

RECURRENT = "cache_params"
"""Name of a cache of recurrent states alone."""

_CACHES = ("past_key_values", "cache", RECURRENT)  # before transformers 5.24, and since then
_CHECKED = (2, 8)  # rows and tokens of the batch whose logits are compared


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


def _without_wrapper(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> nn.Linear:
    """Return the model's output layer.

    Raises:
        ValueError: If it is not a plain linear layer, for example because it has an adapter.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    found = "none" if head is None else f"a {type(head).__name__}"
    raise ValueError(
        f"log-probabilities are computed in chunks from the weight of the output layer, and {type(model).__name__} has "
        f"{found}; leave lm_head out of lora_targets, or take a model whose head is a plain linear layer."
    )


def linear_logits(model: Any, tokens: Tensor, **inputs: Any) -> LinearLogits:
    """Run the model without computing its logits (R, S, V), and return how it computes them.

    The model's own forward runs, so a scale, a cap or a cast before or after its head is part of the result.

    Args:
        model: A causal language model of transformers, bare or wrapped by peft.
        tokens: Token ids (R, S).
        inputs: Other arguments of the model.

    Raises:
        ValueError: If the logits are not a linear layer followed by element-wise operations.
    """
    lm = _without_wrapper(model)
    lm = getattr(lm, "_orig_mod", lm)
    forward = lm if vars(lm).get(COMPILED_CALL) is None else lm.forward  # a compiled head records nothing

    def run() -> Any:
        return forward(input_ids=tokens, use_cache=False, return_dict=True, **inputs).logits

    try:
        found = recorded_logits(head_of(model), run)
        if found.hidden.shape[:-1] != tokens.shape:
            raise UnknownLogitsError(
                f"the head runs on {list(found.hidden.shape[:-1])} positions of {list(tokens.shape)}"
            )
    except UnknownLogitsError as error:
        raise _refusal(lm, str(error)) from None
    return found


@torch.no_grad()
def check_head(model: Any) -> None:
    """Check on a few random tokens that `linear_logits` gives the model's logits.

    With others, training would change another policy than the one sampled.

    Raises:
        ValueError: If they differ.
    """
    head = head_of(model)
    ids = torch.randint(len(head.weight), _CHECKED, generator=torch.Generator().manual_seed(0)).to(head.weight.device)
    with evaluating(model):
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        own = linear_logits(model, ids).computed()
    if own.shape != logits.shape:
        raise _refusal(model, f"they are {list(logits.shape)}, and those of its head {list(own.shape)}")
    if (difference := beyond_rounding(own, logits, dtype=logits.dtype)) is not None:
        raise _refusal(model, f"they differ by {difference:.2g} from those of its head and the operations after it")


def beyond_rounding(found: Tensor, expected: Tensor, *, dtype: torch.dtype) -> float | None:
    """Return the largest difference of logits; None if rounding explains it.

    It is None too if `expected` has a NaN.

    Args:
        found: Logits.
        expected: Other logits of the same shape.
        dtype: The dtype of their computation.
    """
    difference, largest = float((found.float() - expected.float()).abs().max()), float(expected.abs().max())
    rounding = torch.finfo(dtype).eps ** 0.5 * max(largest, 1e-3)
    return None if difference <= rounding or math.isnan(largest) else difference


def _refusal(model: Any, why: str) -> ValueError:
    return ValueError(
        f"the logits of {type(model).__name__} cannot be computed in chunks: {why}. Chunks know a linear head followed by element-wise "
        "operations with numbers or constants. Take another model, or train it by a LightningModule of your own with "
        "UnifiedStrategy, which computes all logits where it must."
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
    logits = linear_logits(model, tokens)
    places = start[:, None] - 1 + torch.arange(chosen.shape[1], device=tokens.device)
    places = places.clamp(0, tokens.shape[1] - 1)[..., None].expand(-1, -1, logits.hidden.shape[-1])
    log_probs, entropy = token_log_probs_and_entropy(
        logits.hidden.gather(1, places).flatten(0, 1),
        logits.weight,
        chosen.flatten(),
        bias=logits.bias,
        temperature=temperature,
        chunk=chunk,
        transform=logits.transform,
    )
    return log_probs.view(chosen.shape), entropy.view(chosen.shape)


def forward_last(lm: Any, *, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
    """Return the logits (N, V) after the last token and the model's cache.

    Raises:
        ValueError: If the model returns no cache.
    """
    takes = inspect.signature(type(lm).forward).parameters
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    if "position_ids" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        inputs.pop("position_ids", None)
    name = cache_argument(lm)
    output = lm(**inputs, **{name: cache}, use_cache=True, return_dict=True)
    if output.get(name) is None:
        raise ValueError(
            f"{type(lm).__name__} returns no {name}, so each token would be computed from all tokens before it; sample from a model that "
            "returns its cache."
        )
    return output.logits[:, -1], output[name]


def cache_argument(module: nn.Module) -> str:
    """Return the name under which a module of transformers takes and returns its cache."""
    takes = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHES if name in takes), _CACHES[0])


def is_recurrent(cache: Any) -> bool:
    """Return whether a cache holds recurrent states, beside keys and values or alone.

    Such states cannot be repeated or dropped by row, and take one more token at a time.
    """
    return any(hasattr(layer, "recurrent_states") for layer in getattr(cache, "layers", None) or [cache])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode inside the context; then restore every submodule's mode.

    This switches off dropout and recomputation. Recomputation, by transformers or this project, is active in train mode only.
    """
    training = [child for child in modules_of(module) if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True
