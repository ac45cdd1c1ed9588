"""Report of a classifier: accuracy, macro F1, AUROC, calibration, Brier score, confusion.

Values are computed from the logits of all rows of an epoch at once, so they do not depend on batches or micro-batches.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.functional import classification
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_unified.models.classifier.evaluation.remarks import remarks
from lightning_unified.models.classifier.training.objective import IGNORED

__all__ = ["Outputs", "Report", "report"]


class Outputs(Metric):
    """Metric that collects the logits and labels of an epoch, over all batches and processes."""

    full_state_update = False
    logits: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logits", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    @override
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch: logits (B, C), labels (B)."""
        self.logits.append(logits.detach().float())
        self.labels.append(labels)

    @override
    def compute(self) -> tuple[Tensor, Tensor]:
        """Return logits (N, C) and labels (N) of all rows that have a label, on the CPU."""
        logits, labels = dim_zero_cat(self.logits).cpu(), dim_zero_cat(self.labels).cpu()
        scored = labels != IGNORED
        return logits[scored], labels[scored]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Metrics of one epoch.

    Attributes:
        rows: Number of rows.
        label_names: The classes, in the order of `confusion`.
        loss: Mean cross-entropy in nats, without class weights and smoothing.
        accuracy: Share of correct predictions.
        macro_f1: Mean of the classes' F1 scores; a class without rows counts only if it was predicted.
        auroc: Mean area under the ROC curve, one class against the rest, over classes with rows; None for fewer than two.
        calibration_error: Expected calibration error: mean distance of confidence and accuracy over bins of confidence.
        brier: Mean squared distance of the probabilities from the label's one-hot vector, between 0 and 2.
        temperature: Divisor of the logits for the two figures below; None without calibration.
        scaled_calibration_error: The calibration error of the scaled probabilities; likewise the Brier score.
        scaled_brier: See above.
        confusion: Rows of class i that were taken for class j.
        reliability: For each bin of confidence: rows, mean confidence, accuracy; of the scaled probabilities if there are any.
    """

    rows: int
    label_names: Sequence[str]
    loss: float
    accuracy: float
    macro_f1: float
    auroc: float | None
    calibration_error: float
    brier: float
    temperature: float | None
    scaled_calibration_error: float | None
    scaled_brier: float | None
    confusion: list[list[int]]
    reliability: list[tuple[int, float, float]]

    def figures(self) -> dict[str, float]:
        """Return the known numbers by name, for logging."""
        values = asdict(self)
        left_out = {"rows", "label_names", "confusion", "reliability"}
        return {name: value for name, value in values.items() if name not in left_out and value is not None}

    def by_class(self) -> list[tuple[str, int, float, float, float]]:
        """Return name, rows, precision, recall and F1 of each class; undefined figures are 0."""
        found = []
        for place, name in enumerate(self.label_names):
            right = self.confusion[place][place]
            rows, answered = sum(self.confusion[place]), sum(row[place] for row in self.confusion)
            f1 = 2 * right / (rows + answered) if rows + answered else 0.0
            found.append((name, rows, right / max(answered, 1), right / max(rows, 1), f1))
        return found

    def remarks(self) -> list[str]:
        """Return a sentence if the answers show that the classes were not learnt, with ways out."""
        return remarks(self.confusion, self.label_names)

    def record(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def report(
    logits: Tensor, labels: Tensor, *, label_names: Sequence[str], temperature: float | None, bins: int = 15
) -> Report:
    """Return the figures of logits (N, C) and labels (N).

    Args:
        logits: Of rows that were not trained on.
        labels: Theirs.
        label_names: The C classes.
        temperature: For the scaled figures; None leaves them out.
        bins: Bins of confidence, of equal width.

    Raises:
        ValueError: If there are no rows.
    """
    if not len(labels):
        raise ValueError("there are no rows to report on; give the data a validation side.")
    classes = logits.shape[1]
    probabilities = logits.double().softmax(1)
    scaled = None if temperature is None else (logits.double() / temperature).softmax(1)
    confusion = classification.multiclass_confusion_matrix(probabilities, labels, num_classes=classes)
    f1 = classification.multiclass_f1_score(probabilities, labels, num_classes=classes, average="macro")
    return Report(
        rows=len(labels),
        label_names=list(label_names),
        loss=float(functional.cross_entropy(logits.double(), labels)),
        accuracy=float((probabilities.argmax(1) == labels).double().mean()),
        macro_f1=float(f1),
        auroc=_auroc(probabilities, labels),
        calibration_error=_calibration_error(probabilities, labels, bins),
        brier=_brier(probabilities, labels),
        temperature=temperature,
        scaled_calibration_error=None if scaled is None else _calibration_error(scaled, labels, bins),
        scaled_brier=None if scaled is None else _brier(scaled, labels),
        confusion=confusion.tolist(),
        reliability=_reliability(probabilities if scaled is None else scaled, labels, bins),
    )


def _auroc(probabilities: Tensor, labels: Tensor) -> float | None:
    present = labels.bincount(minlength=probabilities.shape[1]) > 0
    if int(present.sum()) < 2:
        return None
    areas = [
        classification.binary_auroc(probabilities[:, index], (labels == index).long())
        for index in present.nonzero().flatten().tolist()
    ]
    return float(torch.stack(areas).mean())


def _calibration_error(probabilities: Tensor, labels: Tensor, bins: int) -> float:
    classes = probabilities.shape[1]
    return float(
        classification.multiclass_calibration_error(probabilities, labels, num_classes=classes, n_bins=bins, norm="l1")
    )


def _brier(probabilities: Tensor, labels: Tensor) -> float:
    """Return the Brier score: the mean over rows of the squared errors summed over classes.

    Source: Brier 1950, "Verification of Forecasts Expressed in Terms of Probability", equation 2.
    """
    wanted = functional.one_hot(labels, probabilities.shape[1])
    return float((probabilities - wanted).square().sum(1).mean())


def _reliability(probabilities: Tensor, labels: Tensor, bins: int) -> list[tuple[int, float, float]]:
    confidence, guess = probabilities.max(1)
    right = (guess == labels).double()
    places = (confidence * bins).long().clamp(max=bins - 1)
    rows = places.bincount(minlength=bins)
    sums = torch.stack([torch.zeros(bins, dtype=torch.float64).index_add_(0, places, x) for x in (confidence, right)])
    means = sums / rows.clamp(min=1)
    return [(int(rows[index]), float(means[0, index]), float(means[1, index])) for index in range(bins)]
