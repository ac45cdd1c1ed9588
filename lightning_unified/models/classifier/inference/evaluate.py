"""Evaluate a trained classifier on labelled files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from lightning_unified.models.classifier.data.labelled import LabelledText
from lightning_unified.models.classifier.data.reading import label_files
from lightning_unified.models.classifier.data.reading.format import FileFormat
from lightning_unified.models.classifier.evaluation.report import Report, report
from lightning_unified.models.classifier.inference.classify import logits_of
from lightning_unified.models.classifier.module import TextClassifier

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Figures of a classifier on labelled texts.

    Attributes:
        report: The figures.
        read: Number of texts in the files.
        blank: Texts without a word, which are left out.
        unlabelled: Texts without a label, which are left out.
        not_test: Texts left out because other rows of the files are marked `split=test`.
        cut_off: Evaluated texts that were truncated.
    """

    report: Report
    read: int
    blank: int
    unlabelled: int
    not_test: int
    cut_off: int

    COUNTS: ClassVar = ("read", "blank", "unlabelled", "not_test", "cut_off")

    def text(self) -> str:
        """Return the figures as lines: texts read and left out, the whole set, each class."""
        one = self.report
        left_out = [
            f"{count} {words}"
            for count, words in (
                (self.blank, "blank"),
                (self.unlabelled, "without a label"),
                (self.not_test, "not marked split=test"),
            )
            if count
        ]
        width = max(len("class"), *map(len, one.label_names))
        cut_off = f", {self.cut_off} truncated" if self.cut_off else ""
        lines = [
            f"{self.read} rows read, {one.rows} evaluated{cut_off}"
            + (f"; left out: {', '.join(left_out)}" if left_out else ""),
            ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in one.figures().items()),
            f"{'class':{width}}  {'rows':>7}  precision  recall      F1",
            *(
                f"{name:{width}}  {rows:7,}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}"
                for name, rows, precision, recall, f1 in one.by_class()
            ),
            *one.remarks(),
        ]
        return "\n".join(lines)


def evaluate(
    module: TextClassifier, paths: Sequence[str | Path], *, form: FileFormat | None = None, batch_size: int = 64
) -> Evaluation:
    """Return the figures of a trained classifier on the labelled texts of files or folders.

    Rows marked `split=test` are the test set where a file marks any. No copy is left out.

    Args:
        module: The classifier.
        paths: Files or folders, as training reads them.
        form: Columns and encoding; None for those of the training.
        batch_size: Texts of a batch.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If a file is invalid, no text has a label, or a label is none of the classifier's.
    """
    given = form or module.identity.file_format
    texts = [text for path in paths for text in label_files.read(Path(path), given)]
    test = [text for text in texts if text.is_test]
    marked = test or texts
    with_words = [text for text in marked if text.text.strip()]
    scored = [text for text in with_words if text.label]
    if not scored:
        raise ValueError(f"no row of {', '.join(map(str, paths))} has a text and a label; give some.")
    places = _classes(scored, module.label_names)
    logits, encodings = logits_of(module, [text.text for text in scored], batch_size=batch_size)
    scale = float(module.temperature) if module.hparams["calibrate"] else None
    figures = report(
        logits.float(),
        torch.tensor(places),
        label_names=module.label_names,
        temperature=scale,
        bins=module.hparams["calibration_bins"],
    )
    return Evaluation(
        report=figures,
        read=len(texts),
        blank=len(marked) - len(with_words),
        unlabelled=len(with_words) - len(scored),
        not_test=len(texts) - len(marked),
        cut_off=sum(bool(encoding.overflowing) for encoding in encodings),
    )


def _classes(texts: Sequence[LabelledText], names: Sequence[str]) -> list[int]:
    """Return the number of each text's class."""
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted({text.label for text in texts} - set(names))
    if unknown:
        raise ValueError(
            f"the labels {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''} are none of the classifier's, which are "
            f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}; rename them, or name the column of the class."
        )
    return [numbers[text.label] for text in texts]
