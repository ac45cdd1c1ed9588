"""A loss in chunks adds the gradient of tied weights to `.grad` early, and to nothing that asked for its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy

CHUNKS = pytest.mark.parametrize("chunk_rows", [None, 4], ids=["once", "twice"])  # how often logits are computed


class Tied(nn.Module):
    """A table of vectors that is also the output layer."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(50, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, ids, labels, *, chunk_rows=None, is_plain=False):
        hidden = self.body(self.table(ids)).tanh()
        if is_plain:
            return functional.cross_entropy(hidden @ self.table.weight.T, labels, reduction="sum")
        options = {"weight": self.table.weight, "labels": labels, "chunk_rows": chunk_rows}
        # a transform keeps torch's own function out
        return linear_cross_entropy(hidden, reduction="sum", transform=lambda logits: logits, **options)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def parts():
    return [(torch.randint(50, (9,)), torch.randint(50, (9,))) for _ in range(3)]


@CHUNKS
def test_parts_of_a_batch_have_the_gradients_of_the_whole_plain_loss(net, parts, chunk_rows):
    for ids, labels in parts:
        net(ids, labels, chunk_rows=chunk_rows).backward()
    ours = [one.grad.clone() for one in net.parameters()]
    net.zero_grad()
    net(*map(torch.cat, zip(*parts, strict=True)), is_plain=True).backward()

    assert all(torch.allclose(one, param.grad) for one, param in zip(ours, net.parameters(), strict=True))


@CHUNKS
def test_the_head_is_done_before_the_backward_pass_of_the_body(net, parts, chunk_rows):
    net(*parts[0], chunk_rows=chunk_rows).backward()
    before, seen = net.table.weight.grad.clone(), []
    hidden = net.body(net.table(parts[1][0])).tanh()
    hidden.register_hook(lambda _: seen.append(net.table.weight.grad.clone()))
    options = {"weight": net.table.weight, "labels": parts[1][1], "chunk_rows": chunk_rows}
    linear_cross_entropy(hidden, transform=lambda logits: logits, **options).backward()

    assert not torch.equal(seen[0], before)


@CHUNKS
def test_a_gradient_that_is_asked_for_is_returned_and_nothing_is_added(net, parts, chunk_rows):
    net(*parts[0], chunk_rows=chunk_rows).backward()
    before = net.table.weight.grad.clone()
    found = torch.autograd.grad(net(*parts[1], chunk_rows=chunk_rows), [net.table.weight])
    expected = torch.autograd.grad(net(*parts[1], is_plain=True), [net.table.weight])
    net(*parts[1], chunk_rows=chunk_rows).backward(inputs=[net.body.weight])

    assert torch.allclose(*found, *expected)
    assert torch.equal(net.table.weight.grad, before)


@pytest.mark.parametrize("place", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_whole_gradients_once(net, parts, place):
    net(*parts[0]).backward()
    seen, before = [], net.table.weight.grad.clone()
    getattr(net.table.weight, place)(lambda one: seen.append((one if place == "register_hook" else one.grad).clone()))
    net(*parts[1]).backward()

    (own,) = torch.autograd.grad(net(*parts[1], is_plain=True), [net.table.weight])
    assert len(seen) == 1 + (place == "register_hook")  # torch.autograd.grad calls hooks of tensors too
    assert torch.allclose(seen[0], own if place == "register_hook" else before + own)
