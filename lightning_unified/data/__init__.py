"""Data that several models share.

The package has sources, exact splits, a lossless tokenizer, packed rows, and loaders that resume.

No model is imported here. A model's own data module lies with the model, for example `models.classifier.LabelData`.
`TextData` is imported on first use: a spawned worker imports this package, and importing Lightning takes seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.data.datamodule import TextData

__all__ = ["TextData"]

SHOWS_ITS_LINES = True  # as in lightning_unified.models


def __getattr__(name: str) -> Any:
    if name == "TextData":
        from lightning_unified.data.datamodule import TextData

        return TextData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
