"""Split labelled texts into training, validation and test by group, after removing copies.

An official test set is not changed, so that results compare with published ones; near copies of its texts leave training. All other
texts are split by group, with the same proportion in each class.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_unified.data.splitting import ordered_groups
from lightning_unified.models.classifier.data.duplicates import find_copies
from lightning_unified.models.classifier.data.labelled import LabelledText

__all__ = ["LeftOut", "Sides", "part"]

_STAYING = 2  # groups of a class that stay in training where each share is below one text
_MOST_NAMED = 10  # labels; of fewer, a small data set may have more than half as many as texts


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Numbers of texts left out before the split, by reason.

    Attributes:
        blank: Texts without a word.
        unlabelled: Texts with words and without a label.
        exact: Copies of a text that stays, apart from case and white space.
        near: Near copies of a text that stays.
        like_test: Copies and near copies of a text in an official test set.
        of_other_class: Copies and near copies with another class than the text that stays.
    """

    blank: int
    unlabelled: int
    exact: int
    near: int
    like_test: int
    of_other_class: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The three sides of a split, each in the order of the source.

    Attributes:
        train: Training texts.
        validation: Texts that decide when to stop, the best checkpoint and the temperature.
        test: Texts for the final evaluation.
        is_official: Whether `test` is the source's own test set.
        left_out: Counts of texts on no side.
        read: Number of texts in the source.
    """

    train: list[LabelledText]
    validation: list[LabelledText]
    test: list[LabelledText]
    is_official: bool
    left_out: LeftOut
    read: int


def part(texts: Sequence[LabelledText], *, val_fraction: float, test_fraction: float, seed: int) -> Sides:
    """Remove copies and split the rest.

    Args:
        texts: All texts of a source. Its own test texts, if any, are the test side, without blank ones.
        val_fraction: Share of each class for validation; of an official split, share of its training side.
        test_fraction: Share of each class for the test; no effect if the split is official.
        seed: With the texts, decides the split.

    Raises:
        ValueError: If there are fewer than two classes, labels are no classes, or a class has no training text.
    """
    with_words = [text for text in texts if text.text.strip()]
    worded = [text for text in with_words if text.label]
    _check_labels(worded, read=len(texts))
    official = [text for text in worded if text.is_test]
    # the test set first: of two near copies, the first stays
    ordered = official + [text for text in worded if not text.is_test]
    copies = find_copies([text.text for text in ordered], kept=len(official))
    kept = [text for place, text in enumerate(ordered) if place not in copies.of]
    train = kept[len(official) :]
    test = official
    if not official:
        train, test = _held_out(train, fraction=test_fraction, seed=seed, what="test")
    train, validation = _held_out(
        train, fraction=val_fraction if official else val_fraction / (1 - test_fraction), seed=seed, what="validation"
    )
    sides = Sides(
        train=train,
        validation=validation,
        test=test,
        is_official=bool(official),
        left_out=LeftOut(
            blank=len(texts) - len(with_words),
            unlabelled=len(with_words) - len(worded),
            exact=len(copies.exact),
            near=len(copies.near),
            like_test=sum(kept_place < len(official) for kept_place in copies.of.values()),
            of_other_class=sum(ordered[place].label != ordered[other].label for place, other in copies.of.items()),
        ),
        read=len(texts),
    )
    _check(sides)
    return sides


def _held_out(
    texts: list[LabelledText], *, fraction: float, seed: int, what: str
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return the remaining and the held-out texts.

    Whole groups of each class are held out, up to the class's share. A group belongs to the class of most of its
    texts. The choice of groups does not depend on the order of the texts.
    """
    members: dict[str, list[LabelledText]] = defaultdict(list)
    for text in texts:
        # without a group, the text itself: no other text has the same words
        members[f"group {text.group}" if text.group else f"text {text.text}"].append(text)
    groups_of: dict[str, list[str]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for group, own in members.items():
        label = max(sorted({text.label for text in own}), key=[text.label for text in own].count)
        groups_of[label].append(group)
        sizes[label] += len(own)
    chosen: set[str] = set()
    for label, groups in sorted(groups_of.items()):
        left = round(fraction * sizes[label])
        for group in ordered_groups(groups, seed=seed):
            if len(members[group]) <= left:
                chosen.add(group)
                left -= len(members[group])
    if fraction and not chosen:
        chosen = _of_small_classes(groups_of, members, count=max(1, round(fraction * len(texts))), seed=seed)
    if fraction and not chosen:
        raise ValueError(
            f"{len(texts)} texts in {len(members)} groups leave nothing for {what}: a share of {fraction:.3g} of each class, in whole "
            f"groups, and two groups of a class stay in training; give more texts, smaller groups or a larger share."
        )
    out = {id(text) for group in chosen for text in members[group]}
    return [text for text in texts if id(text) not in out], [text for text in texts if id(text) in out]


def _of_small_classes(
    groups_of: dict[str, list[str]], members: dict[str, list[LabelledText]], *, count: int, seed: int
) -> set[str]:
    """Return one group of each class with three or more groups, up to `count` texts.

    The largest classes come first. This serves data whose classes are all too small for a share of at least one text.

    It serves texts of which every class is too small for its share to be a whole text.
    """
    chosen: set[str] = set()
    for label in sorted(groups_of, key=lambda label: (-len(groups_of[label]), label)):
        own = ordered_groups(groups_of[label], seed=seed)
        fitting = [group for group in own if len(members[group]) <= count]
        if len(own) > _STAYING and fitting:
            chosen.add(fitting[0])
            count -= len(members[fitting[0]])
    return chosen


def _check_labels(texts: Sequence[LabelledText], *, read: int) -> None:
    """Raise unless the labels are at least two classes."""
    labels = sorted({text.label for text in texts})
    if len(labels) < 2:
        raise ValueError(
            f"there is only the class {', '.join(labels) or '(none)'} to learn: {len(texts)} of {read} rows have a text and a label; "
            "give texts of two classes or more."
        )
    if len(labels) > _MOST_NAMED and len(labels) > len(texts) / 2:
        raise ValueError(
            f"{len(texts)} texts have {len(labels)} different labels, such as {labels[len(labels) // 2][:40]!r}: these name no classes. "
            "Give the column of the class as data.label_column=…"
        )


def _check(sides: Sides) -> None:
    learnt = {text.label for text in sides.train}
    if len(learnt) < 2:
        raise ValueError(
            f"there is only the class {', '.join(sorted(learnt)) or '(none)'} to learn, after {sides.left_out.exact} copies and "
            f"{sides.left_out.near} near copies were left out; give texts of two or more."
        )
    unknown = {text.label for text in [*sides.validation, *sides.test]} - learnt
    if unknown:
        raise ValueError(
            f"the classes {', '.join(sorted(unknown)[:5])} have no text to learn from: all are held out or copies; give more of them."
        )
