"""The classifier: a pretrained transformer encoder, fine-tuned on labelled texts.

Its names are imported on first use, so that importing the package does not import Lightning.
"""

from typing import TYPE_CHECKING

from lightning_unified.models import lazy_exports

if TYPE_CHECKING:
    from lightning_unified.models.classifier.data.label_data import LabelData
    from lightning_unified.models.classifier.evaluation.callback import ClassificationReport
    from lightning_unified.models.classifier.inference.classify import classify
    from lightning_unified.models.classifier.inference.exporting import export
    from lightning_unified.models.classifier.module import TextClassifier
    from lightning_unified.models.classifier.training.length import TrainingLength

__all__ = ["ClassificationReport", "LabelData", "TextClassifier", "TrainingLength", "classify", "export"]

__getattr__ = lazy_exports(
    __name__,
    {
        "ClassificationReport": "evaluation.callback",
        "LabelData": "data.label_data",
        "TextClassifier": "module",
        "TrainingLength": "training.length",
        "classify": "inference.classify",
        "export": "inference.exporting",
    },
)
