"""Rules for splitting batches refuse arguments of another type.

The message has the argument and the allowed values.
"""

from dataclasses import FrozenInstanceError

import pytest

import lightning_unified
from lightning_unified import MergeRules, MicroBatchRules, RowRules
from lightning_unified.errors import ConfigurationError

WRONG = [
    ("loss_weight", 0.5, "give a function"),
    ("prepare", "totals", "give a function"),
    ("loss_is_sum", "sum", "give True or False"),
    ("loss_is_sum", 1, "give True or False"),
    ("splittable", None, "give True or False"),
    ("unit", 0, "give a positive number of rows"),
    ("unit", -4, "give a positive number of rows"),
    ("unit", 2.0, "give a positive number of rows"),
    ("unit", True, "give a positive number of rows"),
    ("encoders", "net", "give a tuple of names"),
    ("encoders", (1,), "give a tuple of names"),
    ("encoders", 3, "give a tuple of names"),
    ("batch_norm", "accept", 'give "refuse" or "micro"'),
    ("check", "yes", "give True, False or None"),
    ("check", 1, "give True, False or None"),
    ("rows", {"count": len}, r"give RowRules\(...\)"),
    ("merge", {"correct": "sum"}, r"give MergeRules\(...\)"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_rule_of_another_type_is_refused_by_name(name, value, allowed):
    with pytest.raises(ConfigurationError, match=rf"^MicroBatchRules\({name}=.*{allowed}"):
        MicroBatchRules(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("split", 3, "give a function"),
        ("count", "num_graphs", "give a function"),
        ("shared", "edge_index", "give a tuple of names"),
        ("shared", (0,), "give a tuple of names"),
        ("shared", None, "give a tuple of names"),
    ],
)
def test_a_row_rule_of_another_type_is_refused_by_name(name, value, allowed):
    with pytest.raises(ConfigurationError, match=rf"^RowRules\({name}=.*{allowed}"):
        RowRules(**{name: value})


@pytest.mark.parametrize("group", ["outputs", "logs"])
@pytest.mark.parametrize("rule", ["average", 3, None, ["sum"]])
def test_an_unknown_merge_rule_is_refused_with_those_that_are_known(group, rule):
    with pytest.raises(ConfigurationError, match=rf"^MergeRules\({group}={{'f1': .*'concatenate', 'mean', .*'equal'"):
        MergeRules(**{group: {"f1": rule}})


@pytest.mark.parametrize("given", [["sum"], "sum"])
def test_merge_rules_without_names_are_refused(given):
    with pytest.raises(ConfigurationError, match=r"^MergeRules\(logs=.*give a dict of names and rules"):
        MergeRules(logs=given)


@pytest.mark.parametrize("rule", ["concatenate", "mean", "mean of rows", "sum", "max", "min", "equal", max])
def test_known_merge_rules_and_functions_are_kept(rule):
    assert MergeRules(logs={"n": rule}, outputs={"": rule}).logs["n"] is rule


def test_encoders_of_a_batch_that_may_not_be_split_are_refused():
    with pytest.raises(ConfigurationError, match=r"encoders=…, splittable=False.*leave one of them out"):
        MicroBatchRules(encoders=("net",), splittable=False)


def test_a_rule_of_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="micro_batch_unit"):
        MicroBatchRules(micro_batch_unit=4)


def test_rules_are_given_by_name_and_do_not_change():
    with pytest.raises(TypeError, match="positional"):
        MicroBatchRules(len)
    with pytest.raises(FrozenInstanceError):
        MicroBatchRules().unit = 2


def test_without_arguments_batches_split_between_any_two_rows():
    rules = MicroBatchRules()

    assert (rules.unit, rules.splittable, rules.loss_is_sum) == (1, True, False)
    assert (rules.loss_weight, rules.prepare, rules.rows.split, rules.rows.count) == (None,) * 4


def test_the_rules_are_public():
    assert {"MergeRules", "MicroBatchRules", "RowRules"} <= set(lightning_unified.__all__)
