"""Three sides of labelled texts: to learn from, to choose by, to be judged by; copies are taken out before anything is parted.

An official test set stays as it is, so that figures compare with others'; what is too much like one of its texts leaves training.
Everything else is parted by group and, within each class, in the same proportion.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_unified.data.duplicates import find_copies
from lightning_unified.data.splitting import ordered_groups
from lightning_unified.models.classifier.data.labelled import LabelledText

__all__ = ["LeftOut", "Sides", "part"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """How many texts were left out before the split, and why.

    Attributes:
        blank: Without a word.
        exact: Copies, but for case and white space, of a text that stays.
        near: Near copies of one.
        like_test: How many of the copies and near copies are of a text of an official test set.
        of_other_class: How many of them had another class than the text that stays.
    """

    blank: int
    exact: int
    near: int
    like_test: int
    of_other_class: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """Texts parted, each side in the order of the source.

    Attributes:
        train: To learn from.
        validation: To choose by: when to stop, which checkpoint, the temperature.
        test: To be judged by, once.
        is_official: Whether `test` is what the source holds out.
        left_out: What is on no side.
    """

    train: list[LabelledText]
    validation: list[LabelledText]
    test: list[LabelledText]
    is_official: bool
    left_out: LeftOut


def part(texts: Sequence[LabelledText], *, val_fraction: float, test_fraction: float, seed: int) -> Sides:
    """Take out copies and part the rest.

    Args:
        texts: All of a source. If it holds some out, they are the test side, less those that are blank.
        val_fraction: Share of each class for validation; of an official split, share of its training side.
        test_fraction: Share of each class for the test; without effect if the split is official.
        seed: With the texts, decides what goes where.

    Raises:
        ValueError: If there are fewer than two classes, or a class has nothing to learn from.
    """
    worded = [text for text in texts if text.text.strip()]
    official = [text for text in worded if text.is_test]
    # the test set first: of two that are alike it is the one that stays
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
            blank=len(texts) - len(worded),
            exact=len(copies.exact),
            near=len(copies.near),
            like_test=sum(kept_place < len(official) for kept_place in copies.of.values()),
            of_other_class=sum(ordered[place].label != ordered[other].label for place, other in copies.of.items()),
        ),
    )
    _check(sides)
    return sides


def _held_out(
    texts: list[LabelledText], *, fraction: float, seed: int, what: str
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return the texts that stay and those that are held out: of each class whole groups, up to its share.

    A group counts for the class that most of its texts have. Which groups go does not depend on the order of the texts.
    """
    members: dict[str, list[LabelledText]] = defaultdict(list)
    for text in texts:
        # without a group, the text is its own: no other has the same words
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
    out = {id(text) for group in chosen for text in members[group]}
    if fraction and not out:
        raise ValueError(
            f"{len(texts)} texts in {len(members)} groups leave nothing for {what} (a share of {fraction:.3g} of each class, in whole "
            f"groups); give more texts, smaller groups or a larger share."
        )
    return [text for text in texts if id(text) not in out], [text for text in texts if id(text) in out]


def _check(sides: Sides) -> None:
    learnt = {text.label for text in sides.train}
    if len(learnt) < 2:
        raise ValueError(
            f"there is only the class {', '.join(sorted(learnt)) or '(none)'} to learn; give texts of two or more."
        )
    unknown = {text.label for text in [*sides.validation, *sides.test]} - learnt
    if unknown:
        raise ValueError(
            f"the classes {', '.join(sorted(unknown)[:5])} have no text to learn from: all are held out or copies; give more of them."
        )
