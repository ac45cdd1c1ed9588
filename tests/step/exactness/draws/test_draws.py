"""Replayed by row, a whole run's random draws make micro-batches comparable.

Gradients agree to rounding.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.step.exactness.draws.constant import ConstantDraws
from lightning_unified.step.exactness.draws.operators import without_inner_dropout
from lightning_unified.step.exactness.draws.replay import RecordDraws, ReplayDraws

ROWS, WIDTH = 9, 8
SPLITS = [(1, 3, 5), (4, 4, 1), (2, 7)]
X = torch.randn(ROWS, 4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def repeated(x, order):
    """Return four draws for each row, all of a row together or all rows one after another."""
    return x.repeat_interleave(4, 0) if order == "interleaved" else x.repeat(4, 1)


def times_four(order):
    def draw(x):
        noise = torch.randn_like(repeated(x[:, 0], order))
        rows = noise.view(-1, 4, WIDTH) if order == "interleaved" else noise.view(4, -1, WIDTH).transpose(0, 1)
        return x * rows

    return draw


def attention(x):
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0]


def picked(x):
    return x * (1 + torch.multinomial(x[:, 0].softmax(-1).detach(), WIDTH)[:, None, :])


DRAWS = {
    "noise": lambda x: x + torch.randn_like(x),
    "a draw of its own shape": lambda x: x * torch.rand(len(x), 1, 1, dtype=x.dtype),
    "one draw for all rows": lambda x: x * torch.rand(WIDTH, dtype=x.dtype),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.4)[..., 0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "attention dropout": lambda x: F.dropout((x @ x.mT).softmax(-1), 0.3) @ x,
    "fused attention": attention,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli in place": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "normal in place": lambda x: x * torch.empty_like(x).normal_(1.0, 2.0),
    "torch.normal": lambda x: x * torch.normal(x.detach(), 1.0),
    "uniform in place": lambda x: x * torch.empty_like(x).uniform_(1.0, 2.0),
    "exponential in place": lambda x: x * torch.empty_like(x).exponential_(),
    "random in place": lambda x: x * torch.empty_like(x).random_(5),
    "randint": lambda x: x * torch.randint(5, x.shape),
    "multinomial": picked,
    "gumbel": lambda x: F.gumbel_softmax(x),
    "distributions": lambda x: x * torch.distributions.Beta(x.detach().abs() + 1, 2.0).rsample(),
    "leaky slopes": lambda x: F.rrelu(x, training=True),
    "leaky slopes in place": lambda x: F.rrelu_(1 * x, training=True),
    "several": lambda x: F.dropout(x + torch.randn_like(x), 0.2) * torch.rand(1, dtype=x.dtype),
    "four draws a row, interleaved": times_four("interleaved"),
    "four draws a row, in blocks": times_four("blocks"),
}


def gradient_of(draw, net, x):
    net.zero_grad()
    loss = draw(net(x)).pow(2).flatten(1).mean(1)
    loss.mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def compared(draw, *, sizes=SPLITS[0], order="interleaved"):
    """Return the gradient of all rows, the merged gradient of micro-batches, and the replays."""
    net = nn.Linear(WIDTH, WIDTH).double()
    record = RecordDraws()
    with record:
        whole = gradient_of(draw, net, X)
    total, replays, start = torch.zeros_like(whole), [], 0
    for size in sizes:
        replay = ReplayDraws(record.draws, rows=ROWS, start=start, stop=start + size, order=order)
        with replay:
            total += gradient_of(draw, net, X[start : start + size]) * size / ROWS
        replay.finish()
        replays.append(replay)
        start += size
    return whole, total, replays


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_micro_batches_with_replayed_draws_have_the_whole_gradient(name, sizes):
    order = "blocks" if "blocks" in name else "interleaved"
    whole, parts, replays = compared(DRAWS[name], sizes=sizes, order=order)

    assert [replay.troubles for replay in replays] == [[] for _ in sizes]
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", sorted(set(DRAWS) - {"fused attention", "one draw for all rows"}))
def test_without_a_replay_the_gradients_differ(name):
    net = nn.Linear(WIDTH, WIDTH).double()
    whole = gradient_of(DRAWS[name], net, X)
    parts = sum(gradient_of(DRAWS[name], net, part) * len(part) / ROWS for part in X.split([1, 3, 5]))

    assert not torch.allclose(parts, whole, rtol=1e-6)


@pytest.mark.parametrize("order", ["interleaved", "blocks"])
def test_draws_of_several_entries_a_row_in_the_other_order_differ(order):
    other = "blocks" if order == "interleaved" else "interleaved"
    whole, parts, replays = compared(times_four(order), order=other)

    assert all(replay.is_ordered for replay in replays)
    assert not torch.allclose(parts, whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("draw", "has_drawn"),
    [(DRAWS["dropout"], True), (DRAWS["one draw for all rows"], True), (lambda x: F.dropout(x, 0.5, False), False)],
)
def test_a_record_knows_whether_anything_was_drawn(draw, has_drawn):
    with RecordDraws() as record:
        draw(X)

    assert record.has_drawn is has_drawn


def drawn_twice_for_few(x):
    return x * torch.rand_like(x) if len(x) > 4 else x * torch.rand_like(x) * torch.rand_like(x)


def drawn_for_many(x):
    return x * torch.rand_like(x) if len(x) > 4 else x


INVALID = {
    "a permutation of rows (mixup)": (lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))], "no entries of its own"),
    "more draws in a part": (drawn_twice_for_few, "another random draw"),
    "fewer draws in a part": (drawn_for_many, "fewer random draws for fewer rows"),
    "another operator in a part": (
        lambda x: x * (torch.rand_like(x) if len(x) > 4 else torch.randn_like(x)),
        "another random draw (randn_like)",
    ),
    "more entries than rows": (lambda x: x * torch.rand(len(x) ** 2).sum(), "no entries of its own"),
    **{
        f"{name} of other rows": (draw, "draws from a distribution that depends on other rows")
        for name, draw in {
            "bernoulli": lambda x: x * torch.bernoulli((x - x.mean(0)).sigmoid()),
            "bernoulli in place": lambda x: x * torch.empty_like(x).bernoulli_((x - x.mean(0)).sigmoid()),
            "normal": lambda x: x * torch.normal(x - x.mean(0), 1.0),
            "a normal of all rows": lambda x: x * torch.normal(x.mean(0), 1.0),
            "multinomial": lambda x: x * torch.multinomial(x[:, 0].softmax(0), WIDTH)[:, None, :],
            "poisson": lambda x: x * torch.poisson(x.abs() / x.abs().max()),
        }.items()
    },
}


@pytest.mark.parametrize("name", INVALID)
def test_draws_that_belong_to_no_row_make_the_replay_invalid(name):
    draw, why = INVALID[name]
    troubles = [trouble for replay in compared(draw)[2] for trouble in replay.troubles]

    assert any(why in trouble for trouble in troubles)


@pytest.mark.parametrize("name", DRAWS)
def test_constant_draws_treat_each_row_by_itself(name):
    net = nn.Linear(WIDTH, WIDTH).double()
    gradients = []
    for sizes in ((ROWS,), (1, 3, 5)):
        total = 0.0
        for part in X.split(sizes):
            with ConstantDraws():
                total = total + gradient_of(DRAWS[name], net, part) * len(part) / ROWS
        gradients.append(total)

    assert gradients[0].isfinite().all()
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


def test_constant_permutations_still_move_every_row():
    with ConstantDraws():
        assert torch.randperm(5).tolist() == [4, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("draw", "value"),
    [
        (lambda x: x.uniform_(2.0, 6.0), 4.0),
        (lambda x: x.normal_(3.0, 2.0), 4.0),
        (lambda x: torch.normal(3.0, 2.0, (4,), dtype=torch.float64), 4.0),
        (lambda x: x.random_(3, 9), 3.0),
        (torch.rand_like, 0.5),
        (torch.randn_like, 0.5),
        (lambda x: torch.randint_like(x, 2, 7), 2.0),
        (lambda x: x.bernoulli_(0.2), 1.0),
        (lambda x: F.dropout(torch.full_like(x, 3.0), 0.0), 3.0),
    ],
)
def test_constant_draws_are_in_their_range(draw, value):
    with ConstantDraws():
        assert draw(torch.zeros(4, dtype=torch.float64)).tolist() == [value] * 4


def recurrent_gradient(net, mode, x):
    net.zero_grad()
    with mode:
        (net(x)[0].pow(2).sum() / ROWS).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_with_dropout_agree_over_micro_batches(kind):
    net = kind(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True).double()
    record = RecordDraws()
    replayed, constant, start = 0.0, 0.0, 0
    whole = recurrent_gradient(net, record, X)
    for part in X.split(SPLITS[0]):
        replay = ReplayDraws(
            record.draws,
            rows=ROWS,
            start=start,
            stop=start + len(part),
            order="interleaved",
        )
        replayed = replayed + recurrent_gradient(net, replay, part)
        constant = constant + recurrent_gradient(net, ConstantDraws(), part)
        start += len(part)

    torch.testing.assert_close(replayed, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(constant, recurrent_gradient(net, ConstantDraws(), X), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(constant, whole)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("_scaled_dot_product_efficient_attention", 5),
        ("_scaled_dot_product_flash_attention", 3),
        ("_scaled_dot_product_flash_attention_backward", 10),
        ("_cudnn_rnn", 11),
        ("_cudnn_rnn_backward", 15),
    ],
)
def test_kernels_that_draw_inside_are_called_without_dropout(name, place):
    operator = getattr(torch.ops.aten, name).default
    given = [f"argument {index}" for index in range(len(operator._schema.arguments))]
    called, options = without_inner_dropout(operator, given, {})

    assert "drop" in operator._schema.arguments[place].name
    assert list(called) == [*given[:place], 0.0, *given[place + 1 :]]
    assert without_inner_dropout(operator, (), {operator._schema.arguments[place].name: 0.5})[1] == {
        operator._schema.arguments[place].name: 0.0
    }
    assert options == {}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_fused_kernels_on_a_gpu_agree_over_micro_batches(kind):
    device = torch.device("cuda")
    net = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True).to(device)
    x = X.float().to(device)

    def gradient(part):
        own = part.clone().requires_grad_()
        net.zero_grad()
        (attention(own) if kind == "attention" else net(own)[0]).pow(2).sum().backward()
        return own.grad

    with RecordDraws() as record:
        whole = gradient(x)
    parts, start = [], 0
    for size in SPLITS[0]:
        with ReplayDraws(record.draws, rows=ROWS, start=start, stop=start + size, order="interleaved") as replay:
            parts.append(gradient(x[start : start + size]))
        replay.finish()
        assert replay.troubles == []
        start += size

    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_of_16_bits_are_noted_and_others_are_not(dtype):
    with RecordDraws() as record:
        torch.ones(2).add(1)
        assert record.formats == set()
        torch.ones(2).to(dtype).add(1)

    assert record.formats == {dtype}
