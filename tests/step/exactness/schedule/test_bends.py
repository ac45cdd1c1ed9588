"""A batch whose micro-batches lie on different sides of a bend of the loss is refused before its update."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.bends import LossBends, are_mixed, left_out_before
from tests.support.lanes import first_cells, some
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, found, run


class Bent(Net):
    """Has a term that bends a mean of the batch; only the last micro-batch of batch 9 crosses the bend."""

    def loss(self, out, batch):
        cost = ((1 + 0.1 * out[:, 1]) * batch["cost"]).mean()
        return super().loss(out, batch) + self.bent(cost)


class Limit(Bent):
    def bent(self, cost):
        return F.relu(cost - 1)


class Flood(Bent):
    def bent(self, cost):
        return (cost - 1).abs()


class FreeBits(Bent):
    def bent(self, cost):
        return torch.stack([cost, cost - 9]).clamp(min=1).sum()


class Larger(Bent):
    def bent(self, cost):
        return torch.maximum(cost, torch.ones_like(cost))


class WorstOfTwo(Bent):
    def bent(self, cost):
        return torch.stack([cost, 2 * cost - 1]).max()


class Chosen(Bent):
    def bent(self, cost):
        return torch.where(cost > 1, 3 * cost, cost)


class ByNumber(Bent):
    def bent(self, cost):
        return cost * (3 if cost > 1 else 1)


class ByOperation(Bent):
    def bent(self, cost):
        return cost + cost.square() if cost > 1 else cost


class Rounded(Bent):
    def bent(self, cost):
        return F.huber_loss(cost, torch.full_like(cost, 3))


def both(cost):
    return torch.stack([cost, 2 * cost - 1])


OTHERS = {
    "softplus": lambda cost: F.softplus(cost - 1, beta=50),
    "fmax": lambda cost: torch.fmax(cost, torch.ones_like(cost)),
    "masked_fill": lambda cost: cost.masked_fill(cost < 1, 1.0),
    "topk": lambda cost: both(cost).topk(1).values.sum(),
    "sort": lambda cost: both(cost).sort().values[-1],
    "logaddexp": lambda cost: torch.logaddexp(100 * (cost - 1), torch.zeros_like(cost)),
    "logsumexp": lambda cost: (100 * both(cost)).logsumexp(0),
    "a weight for each term": lambda cost: (both(cost) * torch.tensor([1.0, float(cost > 1)])).sum(),
    "a product with weights": lambda cost: both(cost) @ torch.tensor([1.0, float(cost > 1)]).double(),
    "a power": lambda cost: (cost + 1).pow(2 if cost > 1 else 1),
    "alpha": lambda cost: torch.add(cost, cost, alpha=float(cost > 1)),
    "softshrink": lambda cost: F.softshrink(cost, 1.0),
    "hardsigmoid": lambda cost: F.hardsigmoid(8 * (cost - 1)),
    "prelu": lambda cost: F.prelu(cost[None] - 1, torch.tensor([0.2]).double()).sum(),
    "elu": lambda cost: F.elu(100 * (cost - 1)),
}


class DropsRows(Bent):
    """Leaves the row with the large cost out."""

    def loss(self, out, batch):
        kept = batch["cost"] < 4
        return F.cross_entropy(out[kept], batch["y"][kept])


class SelectsRows(Bent):
    def loss(self, out, batch):
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        return losses.masked_select(batch["cost"] < 4).mean()


KINDS = [
    *(Limit, Flood, FreeBits, Larger, WorstOfTwo, Chosen, ByNumber, ByOperation, Rounded, DropsRows, SelectsRows),
    *(type(name, (Bent,), {"bent": staticmethod(bent)}) for name, bent in OTHERS.items()),
]


def loader():
    """Return batches of costs: the last row of batch 9 has a large one, first rows negative ones."""

    def cost(batch, row):
        return {"cost": torch.tensor(5.0 if (batch, row) == (9, 7) else 0.1 if row else -0.1, dtype=torch.float64)}

    return batches(number=13, size=8, change=cost)


@first_cells(3, "kind", some(KINDS, *KINDS[::3]), ids=lambda kind: kind.__name__)
def test_micro_batches_on_two_sides_of_a_bend_are_refused_before_the_update(kind, checks):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, loader())

    assert checks.steps[-1] == 9


class Kept(Bent):
    """Divides by the number of rows with an ordinary cost: in most batches, all rows."""

    def loss(self, out, batch):
        kept = (batch["cost"] < 4).to(out)
        return (F.cross_entropy(out, batch["y"], reduction="none") * kept).sum() / kept.sum().clamp(min=1)


def test_a_divisor_that_stops_being_the_rows_is_refused_before_the_update(checks):
    with pytest.raises(SplitError, match="Kept cannot be split exactly"):
        run(Kept, loader())

    assert checks.steps[-1] == 9


class Priorities(Net):
    """Divides weights of rows by their largest: all are 1 until batch 8 has changed one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("priorities", torch.ones(4))

    def loss(self, out, batch):
        weights = self.priorities[batch["y"]]
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        return (losses * (weights / weights.max())).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.priorities[0] = 2.0 if batch_idx >= 8 else 1.0


def test_weights_that_begin_to_differ_are_checked_before_the_update(checks):
    with pytest.raises(SplitError, match="Priorities cannot be split exactly"):
        run(Priorities, batches(number=13, size=8))

    assert checks.steps[-1] == 9


class LimitOfSum(Net):
    """Limits a sum over rows that no micro-batch reaches; the whole batch 9 does."""

    def loss(self, out, batch):
        losses = 0.1 * F.cross_entropy(out, batch["y"], reduction="none") * batch["cost"]
        return losses.sum().clamp(max=2.4)


def test_a_bend_that_only_the_whole_batch_crosses_is_refused_before_the_update(checks):
    def cost(batch, row):
        return {"cost": torch.tensor(4.0 if batch == 9 else 1.0, dtype=torch.float64)}

    with pytest.raises(SplitError, match="LimitOfSum cannot be split exactly"):
        run(LimitOfSum, batches(number=13, size=8, change=cost))

    assert checks.steps[-1] == 9


class Rare(Net):
    """Has 100 classes, the last of which occurs once, in batch 9."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 100))


class Weighing(Rare):
    def loss(self, out, batch):
        weight = torch.ones(100, dtype=out.dtype)
        weight[99] = 8
        return F.cross_entropy(out, batch["label"], weight=weight)


def test_a_label_with_another_weight_is_seen_among_many_classes(checks):
    def label(batch, row):
        return {"label": 99 if (batch, row) == (9, 7) else (0, 98, 50, 7)[row % 4]}

    loader = batches(number=13, size=8, change=label)
    module, trainer = run(Weighing, loader)
    whole, _ = run(Weighing, loader, strategy="auto")

    assert 9 in checks.steps
    assert found(trainer).startswith("class weights of 100 classes")
    assert torch.allclose(weights(module), weights(whole), rtol=1e-10, atol=1e-12)


class DrawnLimit(Limit):
    """Draws noise, so that its losses are compared with constant draws."""

    def loss(self, out, batch):
        return super().loss(out + 0.01 * torch.randn_like(out), batch)


@pytest.mark.slow
def test_a_bend_is_found_behind_random_draws(checks):
    with pytest.raises(SplitError, match="DrawnLimit cannot be split exactly"):
        run(DrawnLimit, loader())

    assert checks.steps[-1] == 9


class Teacher(Limit):
    """Writes a buffer that its loss reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def bent(self, cost):
        self.calls += 1
        return F.relu(cost - 2 + 0.1 * self.calls)


@pytest.mark.slow
def test_a_bend_is_compared_from_the_state_before_the_batch():
    with pytest.raises(SplitError, match="Teacher cannot be split exactly"):
        run(Teacher, loader())


class RowByRow(Net):
    """Bends the loss of each row, and weights some rows twice."""

    def loss(self, out, batch):
        each = [
            F.relu(F.cross_entropy(one[None], label[None]) - 1.3) * (2 if label == 1 else 1)
            for one, label in zip(out, batch["y"], strict=True)
        ]
        return torch.stack(each).mean()


@pytest.mark.slow
def test_bends_of_rows_one_by_one_are_split_like_plain_lightnings():
    plain, _ = run(RowByRow, batches(number=20), strategy="auto")
    split, trainer = run(RowByRow, batches(number=20))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-11)
    assert found(trainer).startswith("rows: gradients of ")


def bends_of(*losses):
    bends = LossBends()
    for loss in losses:
        bends.add(loss)
    return bends


def test_losses_on_one_side_are_not_mixed_and_those_on_two_sides_are():
    low, high = (torch.tensor(value, requires_grad=True) for value in (0.5, 2.0))

    assert not are_mixed(bends_of(F.relu(low - 1), F.relu(low - 3)).facts())
    assert are_mixed(bends_of(F.relu(low - 1), F.relu(high - 1)).facts())
    assert are_mixed(bends_of(low * 2, high * 3).facts())
    assert not are_mixed(bends_of(low * 2, high * 2).facts())
    assert are_mixed(bends_of(low * 2, high.exp() * 2).facts())


def test_numbers_of_uneven_micro_batches_differ_unless_they_are_their_rows_or_terms():
    def facts(numbers, counts):
        bends, value = LossBends(), torch.ones((), requires_grad=True)
        for number, (rows, terms) in zip(numbers, counts, strict=True):
            bends.add(value / number, rows=rows, terms=terms)
        return bends.facts()

    counts = [(3, 9.0), (3, 7.0), (2, 8.0)]
    by_rows, by_terms = facts([3, 3, 2], counts), facts([9, 7, 8], counts)

    assert by_rows == facts([6, 6, 4], counts) == facts([1 / 3, 1 / 3, 1 / 2], counts)
    assert len({by_rows, by_terms, facts([3, 2, 2], counts), facts([2, 2, 2], counts)}) == 4


def test_other_entries_of_a_vector_on_the_sides_of_a_bend_are_seen():
    first, second = (torch.tensor(value, requires_grad=True) for value in ([0.5, 2.0], [2.0, 0.5]))

    assert not are_mixed(bends_of(F.relu(first - 1).sum(), F.relu(first - 1.1).sum()).facts())
    assert are_mixed(bends_of(F.relu(first - 1).sum(), F.relu(second - 1).sum()).facts())


def test_the_mixed_rows_are_those_of_the_micro_batch_on_both_sides():
    low, high, both = (torch.tensor(value, requires_grad=True) for value in ([0.5], [2.0], [0.5, 2.0]))
    bends = bends_of(*(F.relu(one - 1).sum() for one in (low, both, high)))

    assert bends.mixed_rows(bends.facts(), [4, 3, 2]) == range(4, 7)
    assert not bends.mixed_rows(frozenset(), [4, 3, 2])
    assert not bends_of(F.relu(low - 1).sum(), F.relu(high - 1).sum()).mixed_rows(bends.facts(), [4, 3])


def test_a_value_that_would_be_computed_again_is_not_read():
    calls = []

    def unpack(value):
        calls.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        loss = F.relu(torch.ones((), requires_grad=True))

    assert not are_mixed(bends_of(loss, loss).facts())
    assert calls == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bends_on_a_cuda_device_are_those_on_the_host():
    def facts(device):
        values = (torch.tensor(value, device=device, requires_grad=True) for value in (0.5, 2.0))
        return bends_of(*(F.relu(value - 1) * 3 * torch.ones((), device=device) for value in values)).facts()

    assert facts("cuda") == facts("cpu")
    assert any(value[-1] for _, kind, value in facts("cuda") if kind == "bends")


def facts_of_factors(*factors):
    bends = LossBends()
    for factor in factors:
        one = torch.ones(3, requires_grad=True)
        bends.add(one.mean() + factor * one.square().sum())
    return bends.facts()


def test_a_factor_that_is_no_longer_0_tells_that_a_term_was_left_out():
    without, with_term = facts_of_factors(0.0, 0.0), facts_of_factors(0.5, 0.5)

    assert left_out_before(with_term) & without
    assert not left_out_before(without) & without
