"""The three sides share no copies.

An official test set stays whole, groups stay together, and class proportions are kept.
"""

from collections import Counter

import pytest

from lightning_unified.models.classifier.data.label_split import part
from lightning_unified.models.classifier.data.labelled import LabelledText


def texts_of(label, count, *, group="", is_test=False):
    return [
        LabelledText(
            text=f"{label} number {number} says {number * 7} and {label}{number}",
            label=label,
            group=group and f"{group} {number // 4}",
            is_test=is_test,
        )
        for number in range(count)
    ]


def parted(texts, **changes):
    return part(texts, **({"val_fraction": 0.1, "test_fraction": 0.2, "seed": 0} | changes))


def test_each_class_is_held_out_in_proportion_and_each_text_is_on_one_side():
    texts = [*texts_of("a", 100), *texts_of("b", 20)]
    sides = parted(texts)

    assert Counter(text.label for text in sides.test) == {"a": 20, "b": 4}
    assert Counter(text.label for text in sides.validation) == {"a": 10, "b": 2}
    assert sorted(text.text for text in [*sides.train, *sides.validation, *sides.test]) == sorted(
        text.text for text in texts
    )


def test_what_goes_where_does_not_depend_on_the_order_of_the_texts_but_on_the_seed():
    texts = [*texts_of("a", 60), *texts_of("b", 60)]

    def names(sides):
        return [{text.text for text in side} for side in (sides.train, sides.validation, sides.test)]

    assert names(parted(texts)) == names(parted(texts[::-1]))
    assert names(parted(texts)) != names(parted(texts, seed=1))


def test_no_group_is_on_two_sides():
    sides = parted([*texts_of("a", 80, group="g"), *texts_of("b", 80, group="h")])
    groups = [{text.group for text in side} for side in (sides.train, sides.validation, sides.test)]

    assert all(groups)
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])


def test_an_official_test_stays_and_what_is_like_it_leaves_training_and_is_counted():
    official = [*texts_of("a", 4, is_test=True), *texts_of("b", 4, is_test=True)]
    learnt = [
        *(
            LabelledText(text=f"{label} fresh {n} text about {label} {n * n} things", label=label)
            for label in "ab"
            for n in range(20)
        ),
        LabelledText(text=official[0].text.upper(), label="a"),
        LabelledText(text=official[5].text, label="a"),
        LabelledText(text="  ", label="a"),
    ]
    sides = parted([*learnt, *official, official[1]])

    assert sides.is_official
    assert sides.test == [*official, official[1]]
    assert {text.text for text in [*sides.train, *sides.validation]} == {text.text for text in learnt[:40]}
    left_out = sides.left_out
    assert (left_out.exact, left_out.near, left_out.like_test, left_out.of_other_class, left_out.blank) == (
        2,
        0,
        2,
        1,
        1,
    )


def test_without_a_share_for_the_test_there_is_none():
    assert parted([*texts_of("a", 20), *texts_of("b", 20)], test_fraction=0).test == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (texts_of("a", 20), "only the class a to learn"),
        ([*texts_of("a", 2), *texts_of("b", 2)], "leave nothing for test"),
        (
            [*texts_of("a", 20), *texts_of("b", 20), *texts_of("c", 3, is_test=True)],
            "classes c have no text to learn from",
        ),
    ],
)
def test_texts_that_cannot_be_parted_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        parted(texts)
