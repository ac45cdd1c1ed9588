"""Load GPT-2's weights into the reader, which has GPT-2's architecture."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.files.safetensors_file import read_tensor
from lightning_unified.models.compressor.network.reader import Reader
from lightning_unified.models.decoder_sizes import DecoderSizes
from lightning_unified.models.pretrained.architecture import read_architecture
from lightning_unified.models.pretrained.source import find_model
from lightning_unified.models.pretrained.streaming import check_complete, stored_tensors

__all__ = ["load_gpt2"]

# names of transformers' GPT2Model and of the reader; `attn.bias` are masks, and `lm_head` is the tied token table
_OUTER = {"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "ln_final"}
_INNER = {
    "ln_1": "ln_attention",
    "attn.c_attn": "qkv",
    "attn.c_proj": "projection",
    "ln_2": "ln_feed_forward",
    "mlp.c_fc": "inner",
    "mlp.c_proj": "outer",
}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_EPS = 1e-5
_STORED = re.compile(r"(?:transformer\.)?(?:h\.(?P<block>\d+)\.)?(?P<module>[\w.]+)\.(?P<own>weight|bias)")


@torch.no_grad()
def load_gpt2(reader: Reader, source: str) -> None:
    """Replace the reader's weights by those of a GPT-2, read from safetensors.

    Args:
        reader: A reader with the sizes of that GPT-2.
        source: A folder, an installed package or a hub id, see `pretrained.source.find_model`.

    Raises:
        FileNotFoundError: If `source` is none of these, or has no safetensors.
        RuntimeError: If the files lack weights.
        ValueError: If it is no GPT-2, or has other sizes than the reader.
    """
    folder = find_model(source, argument="model.pretrained")
    _check_architecture(read_architecture(folder), reader.config, folder=folder)
    missing = dict(reader.named_parameters())
    for stored, place, descriptor in stored_tensors(folder):
        name = _name_of(stored)
        if name not in missing:
            continue
        values = _as_linear(read_tensor(descriptor, place, dtype=torch.float32), reader, name)
        if values.shape == missing[name].shape:
            missing.pop(name).copy_(values)
    check_complete(missing, model=reader, folder=folder)


def _check_architecture(given: Mapping[str, Any], sizes: DecoderSizes, *, folder: Path) -> None:
    """Raise a ValueError unless a configuration describes the reader."""
    kind, activation = given.get("model_type"), given.get("activation_function", "gelu_new")
    if kind != "gpt2" or activation not in _ACTIVATIONS or given.get("layer_norm_epsilon", _EPS) != _EPS:
        raise ValueError(
            f"model.pretrained={folder} is a {kind} with {activation}; the reader is a gpt2 with {_ACTIVATIONS[0]}. Give such a model, or "
            "take model=compressor-smollm2."
        )
    width = given.get("n_embd", 768)
    known = {"vocabulary": "vocab_size", "positions": "n_positions", "layers": "n_layer", "heads": "n_head"}
    found = {name: given[key] for name, key in known.items() if key in given}
    found |= {"width": width, "feed_forward": given.get("n_inner") or 4 * width}
    wrong = [f"model.{name}={size}" for name, size in found.items() if getattr(sizes, name) != size]
    if wrong:
        raise ValueError(f"model.pretrained={folder} has other sizes than the reader; set {' '.join(wrong)}.")


def _name_of(stored: str) -> str:
    """Return the reader's name of a stored tensor; an empty one for tensors that it has not."""
    found = _STORED.fullmatch(stored)
    if found is None:
        return ""
    block, module = found["block"], found["module"]
    name = _OUTER.get(module) if block is None else _INNER.get(module)
    prefix = "" if block is None else f"blocks.{block}."
    return "" if name is None else f"{prefix}{name}.{found['own']}"


def _as_linear(tensor: Tensor, reader: Reader, name: str) -> Tensor:
    """Return a tensor in the layout of `nn.Linear`; GPT-2 stores linear weights transposed."""
    layer = reader.get_submodule(name.rpartition(".")[0])
    return tensor.t() if isinstance(layer, nn.Linear) and name.endswith("weight") else tensor
