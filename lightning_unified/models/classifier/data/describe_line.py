"""The log line about a classifier's data.

It names the rows read, the rows left out, the split, the classes, and surprises.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_unified.models.classifier.data.label_split import Sides

__all__ = ["describe_line"]

_SHOWN = 12  # classes with their number of rows


def describe_line(sides: Sides, *, names: Sequence[str], truncated: str = "") -> str:
    """Return the line.

    Args:
        sides: The split texts.
        names: The classes.
        truncated: How many texts are truncated, and where; empty for none.
    """
    left_out = sides.left_out
    reasons = {
        "blank": left_out.blank,
        "without a label": left_out.unlabelled,
        "duplicates": left_out.exact,
        "near duplicates": left_out.near,
    }
    counted = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    marked = [
        f"{left_out.of_other_class:,} duplicates had another class than the text that stays"
        if left_out.of_other_class
        else "",
        truncated,
        *_surprises(sides, names),
    ]
    parts = [
        f"{sides.read:,} rows read" + (f", left out {', '.join(counted)}" if counted else ", no blank or duplicate"),
        f"{len(sides.train):,} to train, {len(sides.validation):,} to validate, {len(sides.test):,} to test",
        f"{len(names)} classes: {_classes(sides)}",
        *(one for one in marked if one),
    ]
    return "; ".join(parts)


def _classes(sides: Sides) -> str:
    """Return the classes with their training rows, the largest first; for many the range only."""
    counts = Counter(text.label for text in sides.train)
    if len(counts) > _SHOWN:
        return f"{min(counts.values()):,} to {max(counts.values()):,} training rows each"
    return ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts, key=lambda name: (-counts[name], name)))


def _surprises(sides: Sides, names: Sequence[str]) -> list[str]:
    """Return phrases on classes missing from validation, and on names that are nearly equal.

    Such names differ only in case or white space.
    """
    lacking = sorted(set(names) - {text.label for text in sides.validation})
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[" ".join(name.casefold().split())].append(name)
    twins = [" and ".join(map(repr, own)) for own in alike.values() if len(own) > 1]
    return [
        *([f"no validation row of {_listed(lacking)}"] if lacking else []),
        *([f"the classes {', '.join(twins[:3])} differ only in case or white space"] if twins else []),
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
