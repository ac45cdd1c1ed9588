"""Intervals cover what they should, and a difference is compared with itself alone."""

import numpy as np
import pytest

from lightning_unified.models.compressor.evaluation.statistics import compare, estimate


def test_a_95_percent_interval_holds_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(0)
    held = 0
    for number in range(300):
        found = estimate(generator.exponential(size=60), resamples=400, seed=number)
        held += found.low <= 1.0 <= found.high

    assert 0.90 <= held / 300 <= 0.98


def test_documents_without_a_value_do_not_count():
    found = estimate(np.array([1.0, np.nan, 3.0]))

    assert found.mean == 2
    assert found.documents == 2


def test_a_single_document_has_a_mean_and_no_interval():
    found = estimate(np.array([4.0]))

    assert (found.mean, found.low, found.high) == (4.0, None, None)


def test_no_document_is_refused():
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimate(np.array([np.nan]))


def test_a_small_steady_difference_between_very_different_documents_is_found():
    documents = np.random.default_rng(1).normal(0, 10, 40)

    found = compare(documents + 0.1, documents + np.random.default_rng(2).normal(0, 0.05, 40))

    assert found.difference.low > 0
    assert found.p_value < 0.01


def test_chance_alone_is_found_significant_about_5_times_in_100():
    generator = np.random.default_rng(3)
    values = [
        compare(generator.normal(size=25), generator.normal(size=25), resamples=200, seed=n).p_value for n in range(200)
    ]

    assert 0.01 <= np.mean(np.array(values) < 0.05) <= 0.1


def test_equal_methods_have_no_difference_and_p_1():
    values = np.arange(8.0)

    found = compare(values, values)

    assert found.difference.mean == 0
    assert found.p_value == 1


def test_lists_of_other_documents_are_refused():
    with pytest.raises(ValueError, match="cannot be paired"):
        compare(np.zeros(3), np.zeros(4))
