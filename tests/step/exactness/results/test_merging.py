"""Rules that merge micro-batches' values into the whole batch's.

Comparison finds them, and a check that refutes one drops it.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import FIGURES, MergeTable, MicroBatchWeights, fitting, merged
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.trees import all_values, learn_tree, merge_tree, undecided_paths

SIZES = [1, 2, 5]
BY_ROWS = MicroBatchWeights(SIZES, [1.0, 2.0, 5.0])
BY_TERMS = MicroBatchWeights(SIZES, [4.0, 2.0, 3.0])
ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0])
SCORES = torch.tensor([0.9, 0.2, 0.8, 0.4, 0.6, 0.1, 0.7, 0.3], dtype=torch.float64)


def parts_of(values, sizes=SIZES):
    return list(values.split(sizes)) if isinstance(values, torch.Tensor) else [values[:1], values[1:3], values[3:]]


def learned(of, *values, sizes=(SIZES, [4, 1, 3]), table=None, path="v"):
    """Return a table that has seen `of` of all rows and of micro-batches, for each split."""
    table = MergeTable() if table is None else table
    for each in sizes:
        columns = list(zip(*(value.split(list(each)) for value in values), strict=True))
        parts = MicroBatchWeights(list(each), list(map(float, each)))
        table.learn(path, [of(*column) for column in columns], of(*values), parts, tolerance=1e-9)
    return table


NAMED = {
    "concatenate": ([torch.tensor([1]), torch.tensor([2, 3])], [1, 2, 3]),
    "concatenate 1": ([torch.ones(2, 1), torch.zeros(2, 2)], [[1, 0, 0], [1, 0, 0]]),
    "sum": ([torch.tensor(2.0), torch.tensor(5.0)], 7.0),
    "max": ([torch.tensor([2.0, 9.0]), torch.tensor([5.0, 1.0])], [5.0, 9.0]),
    "min": ([torch.tensor([2.0, 9.0]), torch.tensor([5.0, 1.0])], [2.0, 1.0]),
    "mean": ([torch.tensor(2.0), torch.tensor(5.0)], 2.75),
    "mean of rows": ([torch.tensor(2.0), torch.tensor(5.0)], 4.0),
    "equal": ([torch.tensor(3.0), torch.tensor(3.0)], 3.0),
}


@pytest.mark.parametrize("rule", NAMED)
def test_each_rule_gives_what_its_name_says(rule):
    values, whole = NAMED[rule]

    assert merged(rule, values, MicroBatchWeights([1, 2], [3.0, 1.0])).tolist() == whole


@pytest.mark.parametrize(
    ("rule", "values", "whole"),
    [
        ("sum", [2, 5], 7),
        ("max", [2.5, 5], 5),
        ("min", [2.5, 5.0], 2.5),
        ("mean", [2.0, 5.0], 2.75),
        ("concatenate", [["a"], ["b", "c"]], ["a", "b", "c"]),
        ("concatenate", [("a",), ("b",)], ("a", "b")),
        ("equal", ["same", "same"], "same"),
    ],
)
def test_plain_values_are_merged_too(rule, values, whole):
    result = merged(rule, values, MicroBatchWeights([1, 2], [3.0, 1.0]))

    assert result == whole
    assert type(result) is type(whole)


def test_arrays_are_concatenated_and_added():
    arrays = [np.ones((1, 2)), np.zeros((2, 2))]

    assert merged("concatenate", arrays, BY_ROWS).shape == (3, 2)
    assert merged("sum", [np.array([1, 2]), np.array([3, 4])], BY_ROWS).tolist() == [4, 6]


def test_a_function_gets_values_and_rows():
    assert merged(lambda values, rows: (values, rows), ["a", "b", "c"], BY_ROWS) == (["a", "b", "c"], SIZES)


def test_a_micro_batch_without_terms_may_be_nan_in_a_mean():
    values = [torch.tensor(float("nan")), torch.tensor(2.0), torch.tensor(5.0)]

    assert float(merged("mean", values, MicroBatchWeights([1, 1, 1], [0.0, 1.0, 2.0]))) == 4.0


def test_a_mean_without_any_terms_is_over_micro_batches():
    assert float(merged("mean", [torch.tensor(2.0), torch.tensor(4.0)], MicroBatchWeights([1, 3], [0.0, 0.0]))) == 3.0


def test_values_that_must_be_equal_and_are_not_are_an_error():
    with pytest.raises(SplitError, match="the same in all micro-batches so far"):
        merged("equal", [1, 1, 2], BY_ROWS)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("sum", ["a", {}]),
        ("mean", ["a", "b"]),
        ("concatenate", [1, 2]),
        ("concatenate 2", [torch.ones(2), torch.ones(2)]),
        ("max", [torch.ones(2), torch.ones(3)]),
    ],
)
def test_a_rule_that_does_not_apply_is_an_error_that_names_it(rule, values):
    with pytest.raises(SplitError, match=f"cannot be put together by '{rule}'"):
        merged(rule, values, MicroBatchWeights([1, 1], [1.0, 1.0]))


FOUND = {
    "rows": (lambda x: x * 2, "concatenate 0"),
    "columns of rows": (lambda x: x.T * 2, "concatenate 1"),
    "a mean": (lambda x: x.mean(), "mean"),
    "a mean of a column": (lambda x: x.mean(0), "mean"),
    "a sum": (lambda x: x.sum(), "sum"),
    "a maximum": (lambda x: x.max(), "max"),
    "a minimum": (lambda x: x.min(), "min"),
    "a constant": (lambda x: torch.tensor(3.0), "equal"),
    "a count": (lambda x: len(x), "sum"),
    "a number": (lambda x: float(x.sum()), "sum"),
    "names": (lambda x: [f"row {int(v * 1e6)}" for v in x[:, 0]], "concatenate 0"),
    "an array": (lambda x: x.numpy() * 2, "concatenate 0"),
    "an array without dimensions": (lambda x: x.mean().numpy(), "mean"),
    "a sum in an array without dimensions": (lambda x: x.sum().numpy(), "sum"),
    "a norm": (lambda x: x.norm(), None),
    "a median": (lambda x: x[:, 0].median(), None),
    "a root of a mean": (lambda x: x.pow(2).mean().sqrt(), None),
    "a perplexity": (lambda x: x.pow(2).mean().exp(), None),
    "a spread": (lambda x: x.std(), None),
    "similarities": (lambda x: x @ x.T, None),
    "a word that goes by rows": (lambda x: f"{len(x)} rows", None),
    "whether there are many": (lambda x: len(x) > 4, None),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_rule_is_found_by_comparison(name):
    of, rule = FOUND[name]

    assert learned(of, ROWS).rule("v") == rule


def test_a_mean_over_terms_and_one_over_rows_are_told_apart():
    values = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)]

    assert fitting(values, torch.tensor(20 / 9), BY_TERMS, tolerance=1e-6) == {"mean"}
    assert fitting(values, torch.tensor(25 / 8), BY_TERMS, tolerance=1e-6) == {"mean of rows"}


@pytest.mark.parametrize("made", [float, torch.tensor, np.float64, np.array, lambda value: np.array([value])])
@pytest.mark.parametrize("rule", ["sum", "mean", "mean of rows"])
def test_rounding_is_relative_to_summands_that_cancel(made, rule):
    weights = {"sum": [1.0, 1.0, 1.0], "mean": [4 / 9, 2 / 9, 3 / 9], "mean of rows": [1 / 8, 2 / 8, 5 / 8]}[rule]
    shares = [0.001875, -0.00046875, -0.00140625]
    values = [made(share / weight) for share, weight in zip(shares, weights, strict=True)]

    assert fitting(values, made(7e-10), BY_TERMS, tolerance=1e-4) == {rule}
    assert fitting(values, made(7e-7), BY_TERMS, tolerance=1e-4) == set()


def test_small_numbers_are_no_rounding():
    values = [3e-6, 1e-6, 5e-6]

    assert fitting(values, 9e-6, BY_TERMS, tolerance=1e-4) == {"sum"}


def hits(scores, labels):
    return ((scores > 0.5) == (labels > 0)).sum()


def f1(scores, labels):
    hit = ((scores > 0.5) & (labels > 0)).sum()
    return 2 * hit / ((scores > 0.5).sum() + (labels > 0).sum()).clamp_min(1)


def auroc(scores, labels):
    pairs = scores[labels > 0][:, None] > scores[labels == 0]
    return pairs.double().mean() if pairs.numel() else torch.tensor(0.5, dtype=torch.float64)


def median(scores, labels):
    return scores.median()


def perplexity(scores, labels):
    return scores.mean().exp()


LUCKY = {
    # what: values on which a wrong rule fits, the rule, and what is left after ordinary values
    "a count": (hits, [[0.1, 0.2, 0.3], [1, 1, 1]], "equal", "sum"),
    "an F1 score": (f1, [[0.9, 0.8, 0.7], [1, 1, 1]], "equal", None),
    "an area under a curve": (auroc, [[0.5, 0.5, 0.5], [1, 1, 1]], "equal", None),
    "a median": (median, [[0.5, 0.5, 0.5], [1, 0, 1]], "equal", None),
    "a perplexity": (perplexity, [[0.5, 0.5, 0.5], [1, 0, 1]], "equal", None),
}


@pytest.mark.parametrize("name", LUCKY)
def test_a_rule_that_fits_by_luck_is_refuted_by_a_later_check(name):
    of, (scores, labels), lucky, left = LUCKY[name]
    first = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)
    table = learned(of, *first, sizes=([1, 1, 1],))

    assert table.rule("v") == lucky
    assert not table.unmergeable

    learned(of, SCORES, LABELS, table=table)

    assert table.rule("v") == left
    assert table.unmergeable == (set() if left else {"v"})


def test_a_rule_that_was_refuted_does_not_come_back():
    table = learned(lambda x: x.norm(), ROWS)
    learned(lambda x: x.mean(), ROWS, table=table)

    assert table.rule("v") is None
    assert table.unmergeable == {"v"}


def test_values_of_another_kind_in_a_micro_batch_fit_no_rule():
    assert fitting([1, 2.0], 3.0, MicroBatchWeights([1, 1], [1.0, 1.0]), tolerance=1e-6) == frozenset()
    assert (
        fitting([torch.ones(1), [1.0]], torch.ones(2), MicroBatchWeights([1, 1], [1.0, 1.0]), tolerance=0.0)
        == frozenset()
    )


def test_a_truth_value_is_no_figure():
    assert fitting([True, False], True, MicroBatchWeights([1, 1], [1.0, 1.0]), tolerance=0.0) == frozenset()
    assert fitting([True, True], True, MicroBatchWeights([1, 1], [1.0, 1.0]), tolerance=0.0) == {"equal"}


def test_given_rules_are_neither_learned_nor_refuted():
    table = learned(lambda x: x.norm(), ROWS, table=MergeTable(given={"v": "max"}))
    table.reject("v")

    assert table.rule("v") == "max"
    assert table.knows("v")
    assert not table.unmergeable


def test_only_allowed_rules_are_inferred():
    table = MergeTable(allowed=lambda rule: rule.startswith("concatenate"))

    assert learned(lambda x: x.mean(), ROWS, table=table).unmergeable == {"v"}
    assert learned(lambda x: x, ROWS, table=table, path="w").rule("w") == "concatenate 0"


def test_rounding_is_forgiven_and_more_is_not():
    value = torch.tensor([1.0, 1000.0])

    assert same(value, value + torch.tensor([0.0, 1e-4]), tolerance=1e-6)
    assert same(value, value + torch.tensor([1e-4, 0.0]), tolerance=1e-6)  # as the largest entry rounds
    assert not same(value, value + torch.tensor([0.0, 1.0]), tolerance=1e-6)
    assert not same(value, value + 1e-4)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (float("nan"), float("nan"), True),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 1.0]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array([1.0, np.nan]), np.array([1.0 + 1e-12, np.nan]), True),
        (np.array(["a"]), np.array(["a"]), True),
        ([1.0, "a"], [1.0, "a"], True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (1, True, False),
        (None, None, True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
    ],
)
def test_what_counts_as_the_same(one, other, equal):
    assert same(one, other, tolerance=1e-9) is equal


@dataclass
class Output:
    logits: torch.Tensor
    correct: int


def step(x):
    return {"out": Output(x * 2, len(x)), "pair": (x.sum(), x.norm()), "name": "net"}


def learned_tree():
    table = MergeTable()
    for sizes in (SIZES, [4, 1, 3]):
        parts = MicroBatchWeights(sizes, list(map(float, sizes)))
        learn_tree(table, [step(part) for part in ROWS.split(sizes)], step(ROWS), parts, tolerance=1e-9)
    return table


def test_nested_values_are_merged_entry_by_entry():
    values = [step(part) for part in ROWS.split(SIZES)]
    missing = []
    whole = merge_tree(
        learned_tree(), values, BY_ROWS, fallback=lambda path, values: missing.append(path) or "fallback"
    )

    assert torch.equal(whole["out"].logits, ROWS * 2)
    assert (whole["out"].correct, whole["name"]) == (8, "net")
    torch.testing.assert_close(whole["pair"][0], ROWS.sum())
    assert whole["pair"][1] == "fallback"
    assert missing == ["pair.1"]


def test_paths_are_keys_fields_and_indices():
    table, values = learned_tree(), [step(part) for part in ROWS.split(SIZES)]

    assert {path for path, _ in all_values(table, values)} == {"out.logits", "out.correct", "pair.0", "pair.1", "name"}
    assert table.unmergeable == {"pair.1"}
    assert list(undecided_paths(table, values, BY_ROWS)) == []
    assert list(undecided_paths(table, [{**value, "new": 1} for value in values], BY_ROWS)) == ["new"]


def test_a_value_that_must_be_equal_and_is_not_falls_back_from_then_on():
    table = learned(lambda x: torch.tensor(3.0), ROWS)
    result = merge_tree(
        table, [torch.tensor(3.0), torch.tensor(4.0)], BY_ROWS, fallback=lambda path, values: "fallback", path="v"
    )

    assert result == "fallback"
    assert table.rule("v") is None


def test_lists_of_one_entry_a_row_are_one_value():
    table = MergeTable()
    values = [[1], [2, 3], [4, 5, 6, 7, 8]]
    learn_tree(table, values, [1, 2, 3, 4, 5, 6, 7, 8], BY_ROWS, tolerance=0.0, path="ids")

    assert table.rule("ids") == "concatenate 0"


def test_all_figures_are_known_names():
    for rule in FIGURES:
        assert float(merged(rule, [torch.tensor(1.0)], MicroBatchWeights([1], [1.0]))) == 1.0
