"""A loss in chunks adds the gradient of tied weights to `.grad` early.

A gradient that is asked for is returned instead.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from lightning_unified.nn.token_log_probs import token_log_probs
from tests.support.ranks.counted_peaks import join
from tests.support.ranks.processes import on_ranks

KINDS = pytest.mark.parametrize("kind", ["logits once", "logits twice", "log-probabilities"])


def chunked(hidden, weight, labels, kind):
    """Return the sum of the losses, computed in chunks."""
    if kind == "log-probabilities":
        return -token_log_probs(hidden, weight=weight, tokens=labels, chunk=4).sum()
    # a transform keeps torch's own function out
    options = {"chunk_rows": 4 if kind == "logits twice" else None, "transform": lambda logits: logits}
    return linear_cross_entropy(hidden, weight=weight, labels=labels, reduction="sum", **options)


class Tied(nn.Module):
    """A table of vectors that is also the output layer."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(50, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, ids, labels, kind="plain"):
        hidden = self.body(self.table(ids)).tanh()
        if kind == "plain":
            return functional.cross_entropy(hidden @ self.table.weight.T, labels, reduction="sum")
        return chunked(hidden, self.table.weight, labels, kind)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def parts():
    return [(torch.randint(50, (9,)), torch.randint(50, (9,))) for _ in range(3)]


@KINDS
def test_parts_of_a_batch_have_the_gradients_of_the_whole_plain_loss(net, parts, kind):
    for ids, labels in parts:
        net(ids, labels, kind).backward()
    ours = [one.grad.clone() for one in net.parameters()]
    net.zero_grad()
    net(*map(torch.cat, zip(*parts, strict=True))).backward()

    assert all(torch.allclose(one, param.grad) for one, param in zip(ours, net.parameters(), strict=True))


@KINDS
def test_the_head_is_done_before_the_backward_pass_of_the_body(net, parts, kind):
    net(*parts[0], kind).backward()
    before, seen = net.table.weight.grad.clone(), []
    hidden = net.body(net.table(parts[1][0])).tanh()
    hidden.register_hook(lambda _: seen.append(net.table.weight.grad.clone()))
    chunked(hidden, net.table.weight, parts[1][1], kind).backward()

    assert not torch.equal(seen[0], before)


@KINDS
def test_a_gradient_that_is_asked_for_is_returned_and_nothing_is_added(net, parts, kind):
    net(*parts[0], kind).backward()
    before = net.table.weight.grad.clone()
    found = torch.autograd.grad(net(*parts[1], kind), [net.table.weight])
    expected = torch.autograd.grad(net(*parts[1]), [net.table.weight])
    net(*parts[1], kind).backward(inputs=[net.body.weight])

    assert torch.allclose(*found, *expected)
    assert torch.equal(net.table.weight.grad, before)


@pytest.mark.parametrize("place", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_whole_gradients_once(net, parts, place):
    net(*parts[0], "logits once").backward()
    seen, before = [], net.table.weight.grad.clone()
    getattr(net.table.weight, place)(lambda one: seen.append((one if place == "register_hook" else one.grad).clone()))
    net(*parts[1], "logits once").backward()

    (own,) = torch.autograd.grad(net(*parts[1]), [net.table.weight])
    assert len(seen) == 1 + (place == "register_hook")  # torch.autograd.grad calls hooks of tensors too
    assert torch.allclose(seen[0], own if place == "register_hook" else before + own)


class OwnHead(Tied):
    """The output layer has a weight of its own, which no other gradient waits for."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 50, bias=False, dtype=torch.float64)

    def forward(self, ids, labels, kind="plain"):
        hidden = self.body(self.table(ids)).tanh()
        if kind == "plain":
            return functional.cross_entropy(self.head(hidden), labels, reduction="sum")
        return chunked(hidden, self.head.weight, labels, kind)


def trained_by_ddp(of, kind, are_views):
    """Return the weights after steps of two batches, of which the first is reduced with the second."""
    torch.manual_seed(0)
    net = DistributedDataParallel(of(), gradient_as_bucket_view=are_views)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(3):
        for context in (net.no_sync(), contextlib.nullcontext()):
            with context:
                net(torch.randint(50, (9,)), torch.randint(50, (9,)), kind).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)  # then gradients exist before each backward pass
    return [one.detach() for one in net.parameters()]


def both_kinds_by_ddp():
    join(2)
    cells = [(of, are_views) for of in (Tied, OwnHead) for are_views in (False, True)]
    try:
        return [[trained_by_ddp(of, kind, are_views) for kind in ("plain", "logits once")] for of, are_views in cells]
    finally:
        torch.distributed.destroy_process_group()


def test_reductions_over_ranks_find_whole_gradients():
    for plain, ours in on_ranks(both_kinds_by_ddp)[0]:
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
