"""Describe a confusion matrix whose classifier has not learnt its classes."""

from collections.abc import Sequence

__all__ = ["remarks"]

_WAYS = "Try model.class_weights=balanced, more epochs (trainer.max_epochs=10), or another model.learning_rate."
_SHOWN = 5  # classes in a sentence


def remarks(confusion: Sequence[Sequence[int]], label_names: Sequence[str]) -> list[str]:
    """Return at most one sentence about a classifier's failures.

    It says that all rows got one answer, that the classifier is no better than that, or which classes it never
    predicts.

    Args:
        confusion: Rows of class i that were taken for class j.
        label_names: The classes, in that order.
    """
    rows = [sum(row) for row in confusion]
    answered = [sum(row[place] for row in confusion) for place in range(len(confusion))]
    total, most = sum(rows), max(rows)
    largest = label_names[rows.index(most)]
    if total > 1 and max(answered) == total and most < total:
        only = label_names[answered.index(total)]
        return [
            f"Every one of the {total} rows was answered {only!r}, which {rows[answered.index(total)]} of them are. {_WAYS}"
        ]
    right = sum(confusion[place][place] for place in range(len(confusion)))
    if most < total and right <= most:
        return [
            f"{right} of {total} rows were answered rightly; the answer {largest!r} for every row would be right for {most}. {_WAYS}"
        ]
    never = [name for name, own, taken in zip(label_names, rows, answered, strict=True) if own and not taken]
    if never:
        return [
            f"No row was answered {', '.join(map(repr, never[:_SHOWN]))}{' …' if len(never) > _SHOWN else ''}. {_WAYS}"
        ]
    return []
