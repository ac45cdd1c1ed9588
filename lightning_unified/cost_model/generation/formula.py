"""Memory of autoregressive generation by formula; tracing it token by token is too slow.

The peak is weights + KV cache + max(logits, prompt activations), all without gradients.
"""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Generation", "generation_bytes", "kv_cache_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Bytes of a generation at its peak.

    Weights and cache live throughout; of logits and prompt activations only the larger counts.

    Attributes:
        weights: Bytes of the weights, as given.
        cache: Keys and values of all tokens, with the temporary copy of a growing cache.
        logits: Logits of one pass, with the copies that sampling makes.
        prompt: Activations of the pass over the prompt, which is the widest.
    """

    weights: int
    cache: int
    logits: int
    prompt: int

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes."""
        return self.weights + self.cache + max(self.logits, self.prompt)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def kv_cache_bytes(
    *, layers: int, kv_heads: int, head_width: int, batch: int, length: int, item_bytes: int, grows: bool = False
) -> int:
    """Return the bytes of a KV cache.

    The cache holds 2 · layers · batch · kv_heads · length · head_width entries of `item_bytes`.

    Args:
        layers: Number of layers with attention.
        kv_heads: Heads of keys and values; fewer than those of queries in grouped-query attention.
        head_width: Entries of one head's key.
        batch: Number of sequences.
        length: Tokens in the cache: those of the prompt and new ones.
        item_bytes: Bytes of one entry: 4 for float32, 2 for the 16-bit formats.
        grows: Whether each token concatenates the cache anew, as transformers' `DynamicCache` does. Then the old keys (or
            values) of one layer live beside the new ones. A preallocated cache, such as `nn.kv_cache.KVCache`, does not grow.

    Source:
        Two tensors (batch, kv_heads, length, head_width) a layer: Pope et al. 2022, "Efficiently Scaling Transformer
        Inference" §3.

    Example:
        >>> kv_cache_bytes(layers=2, kv_heads=4, head_width=8, batch=1, length=16, item_bytes=2)
        4096
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
    """Return the memory of generating `new` tokens after a prompt, at its peak and without gradients.

    Args:
        weights_bytes: Bytes of the model during generation.
        layers: As in `kv_cache_bytes`.
        kv_heads: As in `kv_cache_bytes`.
        head_width: As in `kv_cache_bytes`.
        vocabulary: Entries of the logits at one position.
        batch: Number of sequences, several samples of one prompt included.
        prompt: Tokens of the longest prompt.
        new: Most tokens generated.
        item_bytes: Bytes of one entry of cache, logits and activations.
        prompts: Sequences in the pass over the prompt, if samples of one prompt share it; None for `batch`.
        grows: As in `kv_cache_bytes`.
        prompt_logits: Positions of the prompt with logits: 1 if only the last has them, `prompt` if all do.
        logits_copies: float32 copies of one position's logits that sampling holds: the scaled logits and their softmax.
        widest: Entries a token that live at once in the widest layer of the pass over the prompt, such as three times the
            width of a gated feed-forward layer; 0 leaves it out.

    Raises:
        ValueError: If a number is negative, or a dimension is not positive.
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
