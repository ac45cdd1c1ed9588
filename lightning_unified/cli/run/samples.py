"""Texts that a trained model writes or its callbacks show, made safe for a terminal."""

import re
from collections.abc import Iterable

from lightning import LightningModule

from lightning_unified.models.samples import SampleWriter

__all__ = ["printable", "sample_texts", "shown_by"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model of bytes may write control sequences


def sample_texts(module: LightningModule, *, seed: int) -> list[str]:
    """Return the texts of a `SampleWriter`, the same for the same weights and `seed`; none for another module."""
    if not isinstance(module, SampleWriter):
        return []
    return [printable(text) for text in module.write_samples(seed=seed)]


def shown_by(callbacks: Iterable[object]) -> list[str]:
    """Return the texts that callbacks hold in `shown`."""
    return [printable(text) for callback in callbacks for text in getattr(callback, "shown", ())]


def printable(text: str) -> str:
    """Return `text` with every control character replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
