"""Memory of autoregressive generation by formula; tracing it token by token is too slow.

The peak is weights + KV cache + max(logits, prompt activations), all without gradients. `generated` finds a module's generating
network, reads its shape and applies the formula.
"""

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

__all__ = ["Generated", "Generation", "NetworkShape", "generated", "generation_before", "generation_bytes"]

# Attribute names in network configurations: transformers' names (its attribute maps cover older ones), then this project's.
_LAYERS = ("num_hidden_layers", "layers")
_HEADS = ("num_attention_heads", "heads")
_WIDTH = ("hidden_size", "width")
_INNER = ("intermediate_size", "feed_forward")
_WORDS = ("vocab_size", "vocabulary")
_NEEDED = (_LAYERS, _HEADS, _WIDTH, _WORDS)
_HALF = ("bf16-true", "16-true")
_LOGITS_COPIES = 2  # float32 copies of one position's logits that sampling holds: the scaled logits and their softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Bytes of a generation at its peak.

    Weights and cache live throughout; of logits and prompt activations only the larger counts.

    Attributes:
        weights: Bytes of the weights.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkShape:
    """The figures of a network that the memory of its generation depends on.

    Attributes:
        layers: Number of layers with attention.
        kv_heads: Heads of keys and values; fewer than those of queries in grouped-query attention.
        head_width: Entries of one head's key.
        vocabulary: Entries of the logits at one position.
        item_bytes: Bytes of one entry of cache, logits and activations: 4 for float32, 2 for the 16-bit formats.
        weights_bytes: Bytes of the model during generation.
        grows: Whether each token concatenates the cache anew, as transformers' `DynamicCache` does. Then the old keys (or
            values) of one layer live beside the new ones. A preallocated cache, such as `models.gearhead.kv_cache.KVCache`, does not grow.
        all_logits: Whether all positions of the prompt have logits; if not, only the last has.
        widest: Entries a token that live at once in the widest layer of the pass over the prompt, such as three times the
            width of a gated feed-forward layer; 0 leaves it out.

    Raises:
        ValueError: If a dimension is not positive, or another number is negative.
    """

    layers: int
    kv_heads: int
    head_width: int
    vocabulary: int
    item_bytes: int
    weights_bytes: int = 0
    grows: bool = False
    all_logits: bool = False
    widest: int = 0

    def __post_init__(self) -> None:
        names = ("layers", "kv_heads", "head_width", "vocabulary", "item_bytes")
        _check_numbers(
            {name: getattr(self, name) for name in names}, weights_bytes=self.weights_bytes, widest=self.widest
        )

    def cache_bytes(self, *, batch: int, length: int) -> int:
        """Return the bytes of the KV cache of `batch` sequences of `length` tokens in all.

        The cache holds 2 · layers · batch · kv_heads · length · head_width entries of `item_bytes`.

        Source:
            Two tensors (batch, kv_heads, length, head_width) a layer: Pope et al. 2022, "Efficiently Scaling Transformer
            Inference" §3.

        Example:
            >>> shape = NetworkShape(layers=2, kv_heads=4, head_width=8, vocabulary=10, item_bytes=2)
            >>> shape.cache_bytes(batch=1, length=16)
            4096
        """
        token = batch * self.kv_heads * self.head_width * self.item_bytes
        held = 2 * self.layers * token * length
        return held + (token * (length - 1) if self.grows and length > 1 else 0)


def generation_bytes(
    shape: NetworkShape, *, batch: int, prompt: int, new: int, prompts: int | None = None
) -> Generation:
    """Return the peak memory of generating `new` tokens after a prompt, without gradients.

    Args:
        shape: The figures of the network.
        batch: Number of sequences, several samples of one prompt included.
        prompt: Tokens of the longest prompt.
        new: Most tokens generated.
        prompts: Sequences in the pass over the prompt, if samples of one prompt share it; None for `batch`.

    Raises:
        ValueError: If `new` is negative, or another number is not positive.
    """
    prompts = batch if prompts is None else prompts
    _check_numbers({"batch": batch, "prompt": prompt, "prompts": prompts}, new=new)
    entries = prompts * (prompt if shape.all_logits else 1) * shape.item_bytes
    return Generation(
        weights=shape.weights_bytes,
        cache=shape.cache_bytes(batch=batch, length=prompt + new),
        logits=shape.vocabulary * (entries + batch * _LOGITS_COPIES * 4),
        prompt=prompts * prompt * shape.widest * shape.item_bytes,
    )


def _check_numbers(positive: dict[str, int], **others: int) -> None:
    wrong = [f"{name}={number}" for name, number in positive.items() if number < 1]
    wrong += [f"{name}={number}" for name, number in others.items() if number < 0]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: give positive numbers, or 0 for new, weights_bytes and widest.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A generation and the memory it takes.

    Attributes:
        rows: Number of sequences.
        prompts: Sequences in the pass over the prompt.
        prompt: Tokens of the longest prompt.
        new: Tokens generated after it.
        parameters: Parameters of the generating network.
        bytes: Bytes by category.
        network: Class name of the generating network.
        grows: Whether each token concatenates the cache anew.
    """

    rows: int
    prompts: int
    prompt: int
    new: int
    parameters: int
    bytes: Generation
    network: str
    grows: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        figures = {"rows": self.rows, "prompt_tokens": self.prompt, "new_tokens": self.new, "network": self.network}
        return {**figures, "bytes": self.bytes.to_dict()}


def generation_before(module: nn.Module, batch: Any, *, precision: str = "32-true") -> Generated | None:
    """Return the generation that precedes a training step on `batch`; None without one.

    A module that generates in its rule `prepare` declares the amount by `generations(batch)`: a dict of `rows`, `prompts`,
    `prompt` and `new` as `generated` takes them, empty for a batch without generation.

    Raises:
        ValueError: As `generated`.
    """
    ask = getattr(module, "generations", None)
    amount = {} if ask is None else dict(ask(batch))
    return generated(module, precision=precision, grows=False, **amount) if amount else None


def generated(
    module: nn.Module,
    *,
    rows: int,
    prompt: int,
    new: int,
    prompts: int | None = None,
    precision: str = "32-true",
    grows: bool | None = None,
) -> Generated:
    """Return the memory `module` takes to generate `new` tokens after a prompt; nothing runs.

    A generating network has a `config` of layers, heads and width, and either `generate` (transformers' models, with a
    growing cache) or `new_cache` (GearHead's, with a preallocated cache). Adapters around it count with the weights.

    Args:
        module: Module whose weights may be on the meta device.
        rows: Number of sequences, several samples of one prompt included.
        prompt: Tokens of the longest prompt. Fewer are counted if learned positions leave no room for `new` after them.
        new: Most tokens generated.
        prompts: Sequences in the pass over the prompt, if samples of one prompt share it; None for `rows`.
        precision: Lightning's name of the precision; under autocast, weights and cache keep the dtype of the weights.
        grows: Whether each token concatenates the cache anew; None for the network's default.

    Raises:
        ValueError: If no network in the module generates, or `new` tokens exceed its positions.
    """
    outermost = next(_networks(module), None)
    if outermost is None:
        raise ValueError(
            f"{type(module).__name__} holds no network known to generate; known are decoder-only transformers models with generate() "
            "and networks with new_cache(), such as GearHead's."
        )
    network = list(_networks(outermost))[-1]  # the innermost: adapters wrap it and forward every call
    config = _text_config(network)
    prompt = _prompt(config, prompt=prompt, new=new)
    width, heads = _figure(config, _WIDTH), _figure(config, _HEADS)
    is_half = precision in _HALF
    item = 2 if is_half else next(network.parameters()).element_size()
    own = not hasattr(network, "new_cache")
    grows = own if grows is None else grows
    last_only = not own or "logits_to_keep" in inspect.signature(network.forward).parameters
    shape = NetworkShape(
        layers=_attention_layers(config),
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        vocabulary=_figure(config, _WORDS),
        item_bytes=item,
        weights_bytes=sum(
            one.numel() * (2 if is_half and one.is_floating_point() else one.element_size())
            for one in [*module.parameters(), *module.buffers()]
        ),
        grows=grows,
        all_logits=not last_only,
        widest=_widest(network, config, width=width),
    )
    found = generation_bytes(shape, batch=rows, prompt=prompt, new=new, prompts=prompts)
    return Generated(
        rows=rows,
        prompts=rows if prompts is None else prompts,
        prompt=prompt,
        new=new,
        parameters=sum(one.numel() for one in network.parameters()),
        bytes=found,
        network=type(network).__name__,
        grows=grows,
    )


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.modules():
        does = callable(getattr(child, "generate", None)) or callable(getattr(child, "new_cache", None))
        config = _text_config(child)
        is_decoder = does and not getattr(config, "is_encoder_decoder", False)
        if is_decoder and all(any(hasattr(config, name) for name in names) for names in _NEEDED):
            yield child


def _text_config(network: nn.Module) -> Any:
    config: Any = getattr(network, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _figure(config: Any, names: tuple[str, ...]) -> int:
    return next(int(getattr(config, name)) for name in names if hasattr(config, name))


def _attention_layers(config: Any) -> int:
    """Return the layers with keys and values.

    Other layers of a hybrid keep a state of constant size.
    """
    kinds = getattr(config, "layer_types", None)
    return sum("attention" in kind for kind in kinds) if kinds else _figure(config, _LAYERS)


def _prompt(config: Any, *, prompt: int, new: int) -> int:
    """Return the prompt tokens that leave room for the new ones within learned positions."""
    positions = getattr(config, "positions", None)
    if positions is None:
        return prompt
    if new >= positions:
        raise ValueError(
            f"new={new} tokens after a prompt do not fit into {positions} learned positions; ask for fewer."
        )
    return min(prompt, positions - new)


def _widest(network: nn.Module, config: Any, *, width: int) -> int:
    """Return the entries a token that live at once in a block of the pass over the prompt.

    These are the residual stream, its normalised copy, and the inner tensors of a feed-forward layer. A gated layer holds the
    gate, the activated gate and the other half; a plain one its inner layer and that layer's activation.
    """
    inner = next((int(getattr(config, name)) for name in _INNER if getattr(config, name, None)), 4 * width)
    gated = any(name.rpartition(".")[2] in ("gate_proj", "gate_up_proj") for name, _ in network.named_modules())
    return 2 * width + (3 if gated else 2) * inner
