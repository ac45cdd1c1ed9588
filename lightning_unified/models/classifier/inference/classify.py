"""Classify texts: rows of similar length together, padded as in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_unified.models.classifier.data.text_encoder import TextEncoder
from lightning_unified.models.classifier.inference.checkpoint import load
from lightning_unified.models.classifier.module import TextClassifier
from lightning_unified.models.classifier.network.trimming import ROW_LENGTHS, fixed_length

__all__ = ["Classification", "classify", "encoder_of", "text_length_of"]

_UNSAID = (16, 32, 64, 128, 256, 512)  # padded lengths if training has set none


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """A classifier's prediction for one text.

    Attributes:
        label: The most likely label.
        probabilities: Probability of every label, the most likely first, scaled by the fitted temperature.
        tokens: Number of tokens read, special ones included.
        cut_off: Whether the text was truncated.
    """

    label: str
    probabilities: dict[str, float]
    tokens: int
    cut_off: bool


@torch.inference_mode()
def classify(
    texts: Sequence[str],
    *,
    module: TextClassifier | None = None,
    checkpoint: str | Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> list[Classification]:
    """Return a trained classifier's prediction for each text, in order.

    Args:
        texts: Texts of any length; each is truncated to the length in training.
        module: A trained classifier, or give `checkpoint`.
        checkpoint: Path of a checkpoint.
        batch_size: Texts of a batch.
        device: For a checkpoint: "cpu", "cuda", "mps" or "auto".

    Raises:
        ValueError: If neither or both of module and checkpoint are given, or a number is out of range.
        RuntimeError: If the classifier has no tokenizer.
    """
    if (module is None) == (checkpoint is None):
        raise ValueError("give a module or a checkpoint, one of the two.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; give 1 or more.")
    model = load(str(checkpoint), device=device) if module is None else module
    was_training = model.training
    model.eval()
    try:
        return _classified(model, texts, batch_size)
    finally:
        model.train(was_training)


def encoder_of(model: TextClassifier) -> TextEncoder:
    """Return the tokenizer of a classifier.

    Raises:
        RuntimeError: If it has none.
    """
    if model.identity.encoder is None:
        raise RuntimeError(
            "this classifier has no tokenizer; train it with a data module that has one, or load a checkpoint."
        )
    return model.identity.encoder


def text_length_of(model: TextClassifier) -> int:
    """Return the tokens read of a text: as in training, else the encoder's positions."""
    return model.identity.text_length or model.network.positions or _UNSAID[-1]


def _classified(model: TextClassifier, texts: Sequence[str], batch_size: int) -> list[Classification]:
    encoder, longest = encoder_of(model), text_length_of(model)
    encodings = encoder.encode(texts, max_length=longest)
    order = sorted(range(len(texts)), key=lambda index: len(encodings[index].ids))
    found: dict[int, Classification] = {}
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        rows = [encodings[place].ids for place in places]
        for place, row in zip(places, _probabilities(model, encoder, rows, longest).tolist(), strict=True):
            ranked = sorted(zip(model.label_names, row, strict=True), key=lambda pair: -pair[1])
            found[place] = Classification(
                label=ranked[0][0],
                probabilities=dict(ranked),
                tokens=len(encodings[place].ids),
                cut_off=bool(encodings[place].overflowing),
            )
    return [found[place] for place in range(len(texts))]


def _probabilities(model: TextClassifier, encoder: TextEncoder, rows: list[list[int]], longest: int) -> Tensor:
    needed = [len(row) for row in rows]
    length = fixed_length(max(needed), lengths=model.identity.lengths or _UNSAID, longest=longest)
    batch = {name: values.to(model.device) for name, values in encoder.batch(rows, length=length).items()}
    return model.probabilities(model.batch_logits({**batch, ROW_LENGTHS: needed})).cpu()
