"""The loss rules that checks agreed on.

The tests cover the remaining candidates, the kept state, and rules that weight a batch differently.
"""

import torch

from lightning_unified import MicroBatchRules
from lightning_unified.step.exactness.agreement import AgreedRules, LastAgreement
from lightning_unified.step.exactness.facts.terms import Terms
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.exactness.trials.judge import Findings

ROWS = LossRule("rows")
MASKED = LossRule("sum of 'mask'", Terms("mask"))
SUM = LossRule("sum", adds=True)


def agreed(*rules, rejected=(), declared=None):
    found = AgreedRules(declared or MicroBatchRules())
    found.add(Findings(agreeing=rules, rejected=set(rejected), rows=4, difference=0.0, noise=""))
    return found


def masks(*counts):
    return [{"mask": torch.arange(4) < count} for count in counts]


def test_a_rejected_rule_is_no_candidate_of_later_batches():
    batch = {"x": torch.randn(4, 3), "mask": torch.tensor([True, True, False, True])}
    names = {rule.name for rule in agreed(ROWS, rejected=["sum of 'mask'"]).candidates(batch, 4)}

    assert names == {"rows", "sum"}


def test_a_rule_that_agreed_stays_a_candidate_of_batches_without_its_field():
    rules = agreed(MASKED).candidates({"x": torch.randn(4, 3)}, 4)

    assert [rule.name for rule in rules] == ["sum of 'mask'", "rows", "sum"]


def test_a_declared_rule_is_the_only_candidate():
    found = agreed(ROWS, declared=MicroBatchRules(loss_is_sum=True))

    assert [rule.name for rule in found.candidates({"x": torch.randn(4, 3)}, 4)] == ["loss_is_sum"]


def test_rules_differ_only_where_their_shares_do():
    rules = agreed(ROWS, MASKED)

    assert not rules.give_other_shares(masks(2, 2), [4, 4])
    assert rules.give_other_shares(masks(1, 3), [4, 4])
    assert agreed(ROWS, SUM).give_other_shares(masks(2, 2), [4, 4])


def test_a_checkpoint_restores_rules_unless_the_declaration_changed():
    state = agreed(ROWS, MASKED, rejected=["sum"]).state_dict()
    same, other = AgreedRules(MicroBatchRules()), AgreedRules(MicroBatchRules(loss_is_sum=True))

    assert same.load_state_dict(state)
    assert same.agreeing == [ROWS, MASKED]
    assert same.state_dict() == state
    assert not other.load_state_dict(state)
    assert other.agreeing == []


def test_only_batches_split_between_an_agreement_and_a_refusal_are_suspect():
    last = LastAgreement(step=3, batch=4)

    assert last.since(4, 5) == ""
    assert "up to step 3 agreed; the first that may have been updated inexactly is step 4" in last.since(5, 6)
