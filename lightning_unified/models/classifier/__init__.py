"""The classifier: a pretrained transformer encoder, fine-tuned on labelled texts.

The names below are imported on first use, so that importing the package does not import Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.models.classifier.data.label_data import LabelData
    from lightning_unified.models.classifier.evaluation.callback import ClassificationReport
    from lightning_unified.models.classifier.inference.classify import classify
    from lightning_unified.models.classifier.inference.exporting import export
    from lightning_unified.models.classifier.module import TextClassifier

__all__ = ["ClassificationReport", "LabelData", "TextClassifier", "classify", "export"]

_HOMES = {
    "ClassificationReport": "evaluation.callback",
    "LabelData": "data.label_data",
    "TextClassifier": "module",
    "classify": "inference.classify",
    "export": "inference.exporting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
