"""Recomputation against the plain run: same noise, same buffers, same gradients."""

import copy

import torch
from torch import nn

from lightning_unified.nn.checkpoint import recompute


class _Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 6))

    def forward(self, x):
        return self.inner(x)


class _Reader(nn.Module):
    """Its output depends on a buffer that it writes, as spectral normalisation's does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        self.count.mul_(2)
        return self.linear(x).sin() * self.count


class _Generator:
    """A generator that torch's own checkpoint does not put back, as the one of MPS."""

    def __init__(self):
        self.source = torch.Generator().manual_seed(7)

    def get_rng_state(self):
        return self.source.get_state()

    def set_rng_state(self, state):
        self.source.set_state(state)


def _run(blocks, *, call):
    torch.manual_seed(1)
    x = torch.randn(5, 6, requires_grad=True)
    y = x
    for block in blocks:
        y = call(block, y)
    y.square().sum().backward()
    state = [value.clone() for block in blocks for value in block.state_dict().values()]
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    return [y, x.grad, *gradients, *state, torch.get_rng_state()]


def _assert_same(blocks, *, call):
    plain = _run(copy.deepcopy(blocks), call=lambda block, x: block(x))
    again = _run(copy.deepcopy(blocks), call=call)

    assert len(plain) == len(again)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_batch_norm_and_dropout_give_the_same_bits():
    _assert_same([_Noisy(), _Noisy()], call=recompute)


def test_torchs_checkpoint_alone_counts_a_batch_twice():
    block = _Noisy()
    torch.utils.checkpoint.checkpoint(block, torch.randn(5, 6), use_reentrant=False).sum().backward()
    assert block.inner[1].num_batches_tracked == 2


def test_a_buffer_that_the_output_depends_on_is_the_one_of_the_first_run():
    _assert_same([_Reader(), _Reader()], call=recompute)


def test_a_generator_torch_does_not_know_is_put_back():
    def outcome(call):
        random_state, linear = _Generator(), nn.Linear(6, 6)
        with torch.no_grad():
            linear.weight.copy_(torch.arange(36.0).view(6, 6) / 36)

        def block(x):
            return linear(x) * torch.rand(5, 6, generator=random_state.source)

        torch.manual_seed(0)
        call(block, torch.randn(5, 6, requires_grad=True), random_state).sum().backward()
        return linear.weight.grad, random_state.get_rng_state()

    plain = outcome(lambda block, x, _: block(x))
    ours = outcome(lambda block, x, random_state: recompute(block, x, random_state=random_state))
    theirs = outcome(lambda block, x, _: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))

    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1])
    assert not torch.equal(plain[0], theirs[0])


def test_two_backward_passes_through_one_graph_agree():
    block, x = _Noisy(), torch.randn(5, 6, requires_grad=True)
    y = recompute(block, x).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)


def test_without_gradients_the_block_is_simply_called():
    calls = []
    block = _Noisy()
    block.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        recompute(block, torch.randn(5, 6))
    assert calls == [1]


def test_the_backward_pass_runs_the_block_again():
    calls = []
    block = _Noisy()
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    recompute(block, torch.randn(5, 6, requires_grad=True)).sum().backward()
    assert calls == [1, 1]
