"""Memory of a module's generation: find its network, read the shape, apply the formula."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_unified.cost_model.generation.formula import Generation, generation_bytes

__all__ = ["Generated", "generated", "generation_before"]

# Attribute names in network configurations: transformers' names (its attribute maps cover older ones), then this project's.
_LAYERS = ("num_hidden_layers", "layers")
_HEADS = ("num_attention_heads", "heads")
_WIDTH = ("hidden_size", "width")
_INNER = ("intermediate_size", "feed_forward")
_WORDS = ("vocab_size", "vocabulary")
_NEEDED = (_LAYERS, _HEADS, _WIDTH, _WORDS)
_HALF = ("bf16-true", "16-true")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A generation and the memory it takes.

    Attributes:
        rows: Number of sequences.
        prompt: Tokens of the longest prompt.
        new: Tokens generated after it.
        bytes: Bytes by category.
        network: Class name of the generating network.
        grows: Whether each token concatenates the cache anew.
    """

    rows: int
    prompt: int
    new: int
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

    Args:
        module: Module whose weights may be on the meta device.
        batch: Batch as the loader returns it, or prepared.
        precision: Lightning's name of the precision.

    Raises:
        ValueError: As `generated`.
    """
    ask = getattr(module, "generations", None)
    told = {} if ask is None else dict(ask(batch))
    return generated(module, precision=precision, grows=False, **told) if told else None


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
    found = generation_bytes(
        weights_bytes=sum(
            one.numel() * (2 if is_half and one.is_floating_point() else one.element_size())
            for one in [*module.parameters(), *module.buffers()]
        ),
        layers=_attention_layers(config),
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        vocabulary=_figure(config, _WORDS),
        batch=rows,
        prompt=prompt,
        new=new,
        item_bytes=item,
        prompts=prompts,
        grows=grows,
        prompt_logits=1 if last_only else prompt,
        widest=_widest(network, config, width=width),
    )
    return Generated(rows=rows, prompt=prompt, new=new, bytes=found, network=type(network).__name__, grows=grows)


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
    """Return the layers with keys and values; other layers of a hybrid keep a state of constant size."""
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
