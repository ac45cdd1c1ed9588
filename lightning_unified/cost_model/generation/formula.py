"""What autoregressive generation takes, by formula: tracing it token by token would take longer than running it."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Generation", "generation_bytes", "kv_cache_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The bytes of a generation at its fullest: weights and cache live throughout, of the rest whichever is larger.

    Attributes:
        weights: As given.
        cache: Keys and values of all tokens, with what a growing cache copies.
        logits: Of one pass, with the copies that sampling makes.
        prompt: Activations of the pass over the prompt, which is the widest.
    """

    weights: int
    cache: int
    logits: int
    prompt: int

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once."""
        return self.weights + self.cache + max(self.logits, self.prompt)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def kv_cache_bytes(
    *, layers: int, kv_heads: int, head_width: int, batch: int, length: int, item_bytes: int, grows: bool = False
) -> int:
    """Return the bytes of a cache of keys and values.

    Args:
        layers: Layers with attention.
        kv_heads: Heads of keys and values; fewer than those of queries in grouped-query attention.
        head_width: Entries of one head's key.
        batch: Sequences at once.
        length: Tokens it holds: of the prompt and new ones.
        item_bytes: Of one entry: 4 for float32, 2 for the 16-bit formats.
        grows: Whether each token concatenates the cache anew, as transformers' `DynamicCache` does: the old keys (or values) of one
            layer then live beside the new ones. A cache taken once, as `nn.kv_cache.KVCache`, does not.

    Source:
        Two tensors (batch, kv_heads, length, head_width) a layer: Pope et al. 2022, "Efficiently Scaling Transformer Inference" §3.
    """
    token = batch * kv_heads * head_width * item_bytes
    held = 2 * layers * token * length
    return held + (token * (length - 1) if grows and length > 1 else 0)


def generation_bytes(
    *,
    weights_bytes: int,
    layers: int,
    kv_heads: int,
    head_width: int,
    vocabulary: int,
    batch: int,
    prompt: int,
    new: int,
    item_bytes: int,
    prompts: int | None = None,
    grows: bool = False,
    prompt_logits: int = 1,
    logits_copies: int = 2,
    widest: int = 0,
) -> Generation:
    """Return what generating `new` tokens behind a prompt takes at its fullest, without gradients.

    Args:
        weights_bytes: Of the model as it generates.
        layers: As in `kv_cache_bytes`, with `kv_heads`, `head_width`, `item_bytes` and `grows`.
        kv_heads: See `layers`.
        head_width: See `layers`.
        vocabulary: Entries of the logits of one position.
        batch: Sequences at once, samples of one prompt included.
        prompt: Tokens of the longest prompt.
        new: The most tokens generated.
        item_bytes: Of one entry of cache, logits and activations.
        prompts: Sequences in the pass over the prompt, where samples of one share it; None for `batch`.
        grows: See `layers`.
        prompt_logits: Positions of the prompt that logits are computed of: 1 where only the last is, `prompt` where all are.
        logits_copies: float32 copies that sampling holds of one position's logits: the scaled ones and their softmax.
        widest: Entries a token that live at once in the widest layer of the pass over the prompt, such as three times the width of
            a gated feed-forward layer; 0 leaves it out.

    Raises:
        ValueError: If a number is negative, or one that makes a shape is not positive.
    """
    shape = {"layers": layers, "kv_heads": kv_heads, "head_width": head_width, "vocabulary": vocabulary}
    prompts = batch if prompts is None else prompts
    shape |= {"batch": batch, "prompt": prompt, "item_bytes": item_bytes, "prompt_logits": prompt_logits}
    shape |= {"prompts": prompts}
    wrong = [f"{name}={number}" for name, number in shape.items() if number < 1]
    rest = {"weights_bytes": weights_bytes, "new": new, "logits_copies": logits_copies, "widest": widest}
    wrong += [f"{name}={number}" for name, number in rest.items() if number < 0]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: give positive numbers, or 0 for new, weights_bytes, logits_copies and widest."
        )
    cache = kv_cache_bytes(
        layers=layers,
        kv_heads=kv_heads,
        head_width=head_width,
        batch=batch,
        length=prompt + new,
        item_bytes=item_bytes,
        grows=grows,
    )
    logits = vocabulary * (prompts * prompt_logits * item_bytes + batch * logits_copies * 4)
    read = prompts * prompt * widest * item_bytes
    return Generation(weights=weights_bytes, cache=cache, logits=logits, prompt=read)
