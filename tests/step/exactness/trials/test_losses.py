"""For each kind of loss exactly one candidate rule gives the whole batch's gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import MicroBatchRules
from lightning_unified.step.exactness.losses import candidates, declared, shares

ROWS, LENGTH, CLASSES = 8, 5, 6
SIZES = [1, 2, 5]
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, LENGTH, 4, generator=GENERATOR, dtype=torch.float64)
LENGTHS = torch.tensor([5, 2, 4, 3, 5, 1, 2, 4])
MASK = torch.arange(LENGTH) < LENGTHS[:, None]
TOKENS = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=GENERATOR)
WEIGHT = torch.rand(ROWS, generator=GENERATOR, dtype=torch.float64) + 0.1


def per_token(out, labels, ignored=-100):
    return F.cross_entropy(out.transpose(1, 2), labels, ignore_index=ignored, reduction="none")


def shifted(out, labels, ignored=-100):
    return F.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=ignored)


def token_mean(out, labels, ignored=-100):
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=ignored)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def filled(value, dtype=torch.long):
    return TOKENS.masked_fill(~MASK, value).to(dtype)


SHARES = MASK * torch.linspace(0.5, 2.0, LENGTH, dtype=torch.float64)  # a weight for each position
ROW_LABELS = torch.tensor([0, 1, -100, 2, -100, 0, 3, 1])
# name: batch, loss of what the net makes of X, rule
CASES = {
    "a mean over the frames of lengths": (
        {"x": X, "lengths": LENGTHS},
        lambda out, b: masked_mean(out.pow(2).mean(2), torch.arange(LENGTH) < b["lengths"][:, None]),
        "sum of 'lengths'",
    ),
    "a mean by weights of positions": (
        {"x": X, "weights": SHARES},
        lambda out, b: masked_mean(out.pow(2).mean(2), b["weights"]),
        "sum of 'weights'",
    ),
    "a mean over rows": ({"x": X}, lambda out, b: out.pow(2).mean(), "rows"),
    "a mean over rows beside labels": (
        {"x": X, "labels": filled(-100)},
        lambda out, b: (per_token(out, b["labels"]).sum(1) / (b["labels"] != -100).sum(1)).mean(),
        "rows",
    ),
    "scored labels": ({"x": X, "labels": filled(-100)}, lambda out, b: token_mean(out, b["labels"]), "scored labels"),
    "scored labels, shifted": (
        {"x": X, "labels": filled(-100)},
        lambda out, b: shifted(out, b["labels"]),
        "scored labels, shifted",
    ),
    "labels of rows, some ignored": (
        {"x": X, "target": ROW_LABELS},
        lambda out, b: F.cross_entropy(out[:, 0], b["target"]),
        "scored labels",
    ),
    "nested labels": (
        {"in": {"x": X}, "out": {"labels": filled(-100)}},
        lambda out, b: token_mean(out, b["out"]["labels"]),
        "scored out.labels",
    ),
    "ignore_index=0 in a tuple": (
        (X, filled(0)),
        lambda out, b: token_mean(out, b[1], ignored=0),
        "entries of '1' other than 0",
    ),
    "ignore_index=0 in a tuple, shifted": (
        (X, filled(0)),
        lambda out, b: shifted(out, b[1], ignored=0),
        "entries of '1' other than 0, shifted",
    ),
    "ignore_index=-1": (
        (X, filled(-1)),
        lambda out, b: token_mean(out, b[1], ignored=-1),
        "entries of '1' other than -1",
    ),
    "ignore_index=-100 under another name": (
        (X, filled(-100)),
        lambda out, b: token_mean(out, b[1]),
        "entries of '1' other than -100",
    ),
    "labels that leave out 0": (
        {"x": X, "labels": filled(0)},
        lambda out, b: token_mean(out, b["labels"], ignored=0),
        "entries of 'labels' other than 0",
    ),
    "a boolean mask": (
        {"x": X, "mask": MASK},
        lambda out, b: masked_mean(out.pow(2).sum(-1), b["mask"]),
        "sum of 'mask'",
    ),
    "a mask of whole numbers": (
        {"x": X, "mask": MASK.long()},
        lambda out, b: masked_mean(out.pow(2).sum(-1), b["mask"]),
        "sum of 'mask'",
    ),
    "a mask of floats, shifted": (
        {"x": X, "mask": MASK.double()},
        lambda out, b: masked_mean(out[:, :-1].pow(2).sum(-1), b["mask"][:, 1:]),
        "sum of 'mask', shifted",
    ),
    "weights of rows": (
        {"x": X, "weight": WEIGHT},
        lambda out, b: masked_mean(out.pow(2).mean((1, 2)), b["weight"]),
        "sum of 'weight'",
    ),
    "weights of rows, some zero": (
        {"x": X, "weight": WEIGHT * (WEIGHT > 0.5)},
        lambda out, b: masked_mean(out.pow(2).mean((1, 2)), b["weight"]) if b["weight"].any() else 0 * out.sum(),
        "sum of 'weight'",
    ),
    "a sum": ({"x": X}, lambda out, b: out.pow(2).sum(), "sum"),
    "a sum beside labels": (
        {"x": X, "labels": filled(-100)},
        lambda out, b: per_token(out, b["labels"]).sum(),
        "sum",
    ),
    "a positional loss": ({"x": X}, lambda out, b: out[0].sum(), None),
    "class weights": (
        {"x": X, "labels": filled(-100)},
        lambda out, b: F.cross_entropy(
            out.flatten(0, 1), b["labels"].flatten(), torch.arange(1.0, CLASSES + 1).double()
        ),
        None,
    ),
    "a product of means": ({"x": X}, lambda out, b: out.mean() * out.pow(2).mean(), None),
}


def part_of(batch, start, stop):
    if isinstance(batch, torch.Tensor):
        return batch[start:stop]
    if isinstance(batch, tuple):
        return tuple(part_of(each, start, stop) for each in batch)
    return {name: part_of(each, start, stop) for name, each in batch.items()}


def rules_that_hold(batch, loss):
    """Return the candidates that give the whole batch's gradients, and all candidates."""
    net = nn.Linear(4, CLASSES).double()

    def gradient(start, stop):
        net.zero_grad()
        loss(net(X[start:stop]), part_of(batch, start, stop)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])

    whole, starts = gradient(0, ROWS), [0, 1, 3]
    gradients = [gradient(start, start + size) for start, size in zip(starts, SIZES, strict=True)]
    parts = [part_of(batch, start, start + size) for start, size in zip(starts, SIZES, strict=True)]
    rules = candidates(batch, ROWS)
    hold = []
    for rule in rules:
        pairs = zip(gradients, shares(rule, parts, SIZES), strict=True)
        if torch.allclose(sum(one * share for one, share in pairs if share), whole, rtol=1e-9, atol=1e-12):
            hold.append(rule.name)
    return hold, [rule.name for rule in rules]


@pytest.mark.parametrize("name", CASES)
def test_the_rule_that_a_loss_needs_is_a_candidate_and_the_first_that_holds(name):
    batch, loss, rule = CASES[name]
    hold, _ = rules_that_hold(batch, loss)

    assert hold[:1] == ([] if rule is None else [rule])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_every_other_rule_that_holds_gives_the_same_shares(name):
    batch, loss, _ = CASES[name]
    hold, every = rules_that_hold(batch, loss)
    parts = [part_of(batch, start, stop) for start, stop in ((0, 1), (1, 3), (3, 8))]
    weights = [shares(rule, parts, SIZES) for rule in candidates(batch, ROWS) if rule.name in hold]

    assert len(hold) < len(every)
    assert all(one == pytest.approx(weights[0]) for one in weights)


def test_rows_come_first_and_sums_last():
    names = [rule.name for rule in candidates({"labels": filled(-100), "mask": MASK}, ROWS)]

    assert names == [
        "rows",
        "scored labels",
        "scored labels, shifted",
        "sum of 'mask'",
        "sum of 'mask', shifted",
        "sum",
    ]


def test_tensors_of_another_length_features_and_complex_ones_are_no_candidates():
    batch = {
        "x": X,
        "w": -WEIGHT,
        "z": torch.ones(ROWS, dtype=torch.complex64),
        "other": torch.zeros(3, dtype=torch.long),
        "s": torch.tensor(0),
    }

    assert [rule.name for rule in candidates(batch, ROWS)] == ["rows", "sum"]


def test_sparse_tensors_are_no_candidates():
    batch = {"x": X, "edges": torch.eye(ROWS, dtype=torch.long).to_sparse(), "rows": torch.eye(ROWS).to_sparse_csr()}

    assert [rule.name for rule in candidates(batch, ROWS)] == ["rows", "sum"]


def test_micro_batches_without_terms_have_no_share_and_none_at_all_go_by_rows():
    batch = {"labels": torch.tensor([[-100, -100], [1, 2], [3, -100]])}
    rule = candidates(batch, 3)[1]
    parts = [part_of(batch, index, index + 1) for index in range(3)]

    assert shares(rule, parts, [1, 1, 1]) == pytest.approx([0, 2 / 3, 1 / 3])
    assert shares(rule, [parts[0], parts[0]], [1, 3]) == [0.25, 0.75]


def test_a_micro_batch_without_the_leaf_counts_nothing():
    rule = candidates({"labels": filled(-100)}, ROWS)[1]

    assert rule.count({"x": X}) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_labels_of_few_bits_are_counted(dtype):
    batch = (X, filled(0, dtype=dtype))
    hold = next(rule for rule in candidates(batch, ROWS) if rule.name == "entries of '1' other than 0")

    assert float(hold.count(batch)) == float(LENGTHS.sum())


def count(batch):
    return 7


@pytest.mark.parametrize(
    ("rules", "name", "adds"),
    [
        (MicroBatchRules(loss_weight=count), "loss_weight", False),
        (MicroBatchRules(loss_is_sum=True), "loss_is_sum", True),
        (MicroBatchRules(loss_is_sum=True, loss_weight=count), "loss_is_sum", True),
    ],
)
def test_a_declared_rule_is_the_rule(rules, name, adds):
    assert (declared(rules).name, declared(rules).adds) == (name, adds)


def test_nothing_declared_leaves_the_rule_to_be_found():
    assert declared(MicroBatchRules(unit=4)) is None
