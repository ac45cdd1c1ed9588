"""Classify texts: rows of similar length together, padded as in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding
from torch import Tensor

from lightning_unified.models.classifier.data.tokens.text_encoder import Encoded, TextEncoder
from lightning_unified.models.classifier.inference.checkpoint import load
from lightning_unified.models.classifier.module import TextClassifier
from lightning_unified.models.classifier.network.trimming import ROW_LENGTHS, fixed_length

__all__ = ["Classification", "classify", "encoder_of", "logits_of", "text_length_of"]

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
    model = load(str(checkpoint), device=device) if module is None else module
    logits, encodings = logits_of(model, texts, batch_size=batch_size)
    found = []
    for row, encoding in zip(model.probabilities(logits.to(model.device)).tolist(), encodings, strict=True):
        ranked = sorted(zip(model.label_names, row, strict=True), key=lambda pair: -pair[1])
        found.append(
            Classification(
                label=ranked[0][0],
                probabilities=dict(ranked),
                tokens=len(encoding.ids),
                cut_off=bool(encoding.overflowing),
            )
        )
    return found


@torch.inference_mode()
def logits_of(
    model: TextClassifier, texts: Sequence[str], *, batch_size: int = 64
) -> tuple[Tensor, Sequence[Encoding | Encoded]]:
    """Return the logits (N, C) of N texts on the CPU, and their encodings; dropout is off.

    Raises:
        ValueError: If `batch_size` is below 1.
        RuntimeError: If the classifier has no tokenizer.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; give 1 or more.")
    encoder, longest = encoder_of(model), text_length_of(model)
    encodings = encoder.encode(texts, max_length=longest)
    order = sorted(range(len(texts)), key=lambda index: len(encodings[index].ids))
    pieces = []
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            rows = [encodings[place].ids for place in order[start : start + batch_size]]
            pieces.append(_logits(model, encoder, rows, longest))
    finally:
        model.train(was_training)
    places = torch.tensor(order, dtype=torch.int64).argsort()
    return torch.cat(pieces)[places] if pieces else torch.zeros(0, len(model.label_names)), encodings


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


def _logits(model: TextClassifier, encoder: TextEncoder, rows: list[list[int]], longest: int) -> Tensor:
    needed = [len(row) for row in rows]
    length = fixed_length(max(needed), lengths=model.identity.lengths or _UNSAID, longest=longest)
    batch = {name: values.to(model.device) for name, values in encoder.batch(rows, length=length).items()}
    return model.batch_logits({**batch, ROW_LENGTHS: needed}).cpu()
