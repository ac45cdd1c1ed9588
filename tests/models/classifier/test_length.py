"""The number of epochs follows the number of rows.

A remark names a classifier that learnt nothing.
"""

import pytest

from lightning_unified.models.classifier.evaluation.remarks import remarks
from lightning_unified.models.classifier.training.length import TrainingLength, epochs_for


@pytest.mark.parametrize(("steps", "wanted"), [(500, (3, 1)), (67, (3, 1)), (7, (30, 3)), (1, (200, 20)), (60, (4, 1))])
def test_few_rows_train_for_more_epochs_and_validate_every_few(steps, wanted):
    epochs, every = epochs_for(steps=steps, epochs=3, least_steps=200, validations=10)

    assert (epochs, every) == wanted
    assert epochs * steps >= 200
    assert epochs % every == 0


@pytest.mark.parametrize(
    ("limits", "steps"),
    [({"max_steps": -1, "max_epochs": -1}, 12), ({"max_steps": -1, "max_epochs": 2}, 8), ({"max_steps": 5}, 5)],
)
def test_the_callback_ends_only_a_fit_without_an_end_of_its_own(build, data, fit, limits, steps):
    length = TrainingLength(epochs=1, least_steps=11, validations=5)
    trainer = fit(build(), data, callbacks=[length], **limits)

    assert trainer.global_step == steps
    assert length.describe_line() == (
        "at most 3 epochs of 4 steps, a validation every epoch; trainer.max_epochs sets another number"
        if limits.get("max_epochs") == -1
        else ""
    )


@pytest.mark.parametrize(
    ("confusion", "said"),
    [
        ([[6, 0, 0], [3, 0, 0], [1, 0, 0]], "Every one of the 10 rows was answered 'a', which 6 of them are"),
        ([[3, 3, 0], [1, 2, 0], [0, 1, 0]], "5 of 10 rows were answered rightly; the answer 'a' for every row"),
        ([[6, 0, 0], [0, 3, 0], [1, 0, 0]], "No row was answered 'c'"),
        ([[6, 0, 0], [0, 2, 1], [0, 0, 1]], None),
        ([[3, 0, 0], [0, 0, 0], [0, 0, 0]], None),
    ],
)
def test_a_confusion_that_shows_nothing_learnt_is_said_with_ways_out(confusion, said):
    found = remarks(confusion, ["a", "b", "c"])

    assert found == [] if said is None else (said in found[0] and "model.class_weights=balanced" in found[0])
