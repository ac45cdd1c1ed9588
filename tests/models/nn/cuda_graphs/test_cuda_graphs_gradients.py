"""Gradients of replayed calls: where they are, and that they are those of eager calls.

Python stands in for the replay and repeats the call.
"""

import copy
import weakref

import pytest
import torch
from torch import nn

from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, differentiate
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy
from tests.support.modules.recorded.cpu import IDS, gradients, settle, step

pytestmark = pytest.mark.usefixtures("graphs_by_python")


class TiedHead(nn.Module):
    """One head is the embedding's weight, another has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.own = nn.Embedding(24, 4), nn.Linear(4, 4), nn.Linear(4, 24)

    def forward(self, ids):
        hidden = self.body(self.table(ids)).tanh()
        tied = linear_cross_entropy(hidden, weight=self.table.weight, labels=ids)
        return tied + linear_cross_entropy(hidden, weight=self.own.weight, bias=self.own.bias, labels=ids)


def test_gradients_accumulate_over_replays(net):
    RecordedCalls(net)
    settle(net, IDS)
    step(net)
    once = gradients(net)
    step(net)

    assert torch.allclose(net.first.weight.grad, 2 * once["first.weight"])


def storages(tensors):
    return {one.untyped_storage().data_ptr() for one in tensors if one is not None}


def test_gradients_are_where_they_were_recorded_to_go(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    for _ in range(2):  # as parts of a batch
        step(net)

    assert storages(one.grad for one in net.parameters()) == storages(recorded.gradients)


def test_weights_that_are_used_outside_of_the_recording_too_get_the_sum_of_both(net):
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    settle(net, IDS)
    for _ in range(3):
        for one in (net, plain):
            (one(IDS).square().mean() + one.table.weight.square().sum()).backward()

    ours, theirs = gradients(net), gradients(plain)
    assert all(torch.allclose(ours[name], theirs[name]) for name in ours if theirs[name] is not None)
    assert storages(one.grad for one in net.parameters()) == storages(recorded.gradients)


def test_a_gradient_from_outside_stays_where_a_hook_may_look_at_it(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    net.table.weight.register_post_accumulate_grad_hook(lambda _: None)
    for _ in range(3):
        (net(IDS).square().mean() + net.table.weight.square().sum()).backward()

    assert net.table.weight.grad.untyped_storage().data_ptr() not in storages(recorded.gradients)


def test_a_head_with_chunked_loss_is_trained_as_eagerly():
    net, plain = TiedHead(), TiedHead()
    plain.load_state_dict(net.state_dict())
    recorded = RecordedCalls(net)
    settle(net, IDS)
    for _ in range(3):
        for one in (net, plain):
            one(IDS).backward()

    assert recorded.recorded == 1
    ours, theirs = gradients(net), gradients(plain)
    assert all(torch.allclose(ours[name], theirs[name]) for name in theirs)


def test_the_buffer_ends_with_the_recordings(net):
    recorded = RecordedCalls(net)
    assert not recorded.gradients
    settle(net, IDS)
    assert recorded.gradients
    step(net, IDS[:2])  # a new shape frees the recordings
    assert not recorded.gradients


@pytest.mark.parametrize("kept_as", ["gradients", "values", "one of them", "hooked"])
def test_gradients_that_somebody_keeps_are_not_written_over(net, kept_as):
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    settle(net, IDS)
    step(net)
    kept = {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    values = {name: one.clone() for name, one in kept.items()}
    if kept_as == "values":  # as a window of batches has them set aside
        net.zero_grad()
    if kept_as == "one of them":
        net.first.weight.grad = None
    if kept_as == "hooked":
        net.first.weight.register_hook(lambda grad: grad * 1)
    step(net, IDS + 3)

    for ids, zeroed in ((IDS, kept_as == "values"), (IDS + 3, False)):
        step(plain, ids)
        if zeroed:
            plain.zero_grad()
        elif kept_as == "one of them" and ids is IDS:
            plain.first.weight.grad = None
    for name, one in plain.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(net.get_parameter(name).grad, one.grad)
    if kept_as in {"values", "one of them"}:
        assert torch.equal(kept["first.weight"], values["first.weight"])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_begin_at_nothing_after_they_are_zeroed(net, set_to_none):
    RecordedCalls(net)
    settle(net, IDS)
    step(net)
    once = gradients(net)
    net.zero_grad(set_to_none=set_to_none)
    step(net)

    assert all(torch.equal(one, gradients(net)[name]) for name, one in once.items() if one is not None)


def test_replays_and_eager_calls_add_to_the_same_gradients(net):
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    settle(net, IDS)
    for one in (net, plain):
        for ids in (IDS, IDS[:2], IDS):  # the second is new, and runs eagerly
            step(one, ids)

    ours, theirs = gradients(net), gradients(plain)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-7) for name in ours if theirs[name] is not None)


def test_gradients_that_are_there_at_a_recording_move_to_where_others_will_go(net):
    plain, recorded = copy.deepcopy(net), RecordedCalls(net)
    for one in (net, plain):
        step(one)
    kept, before = net.first.weight.grad, gradients(net)
    net(IDS)
    assert recorded.recorded == 1

    assert storages(one.grad for one in net.parameters()) == storages(recorded.gradients)
    assert all(torch.equal(one, gradients(net)[name]) for name, one in before.items() if one is not None)
    assert torch.equal(kept, plain.first.weight.grad)


def test_gradients_of_eager_calls_are_gathered_with_their_values(net):
    plain, recorded = copy.deepcopy(net), RecordedCalls(net)
    for one in (net, plain):
        step(one)
    recorded.gather()

    assert recorded.recorded == 0
    assert storages(one.grad for one in net.parameters()) == storages(recorded.gradients)
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) is (other.grad is None)
        assert own.grad is None or torch.equal(own.grad, other.grad)


def test_no_gradient_is_on_the_device_while_the_buffer_is_made(net, monkeypatch):
    step(net)
    values, seen, empty = gradients(net), [], GradientBuffer({})

    def fail(*_):
        seen.append([one.grad for one in net.parameters()])
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GradientBuffer, "__init__", fail)
    with pytest.raises(torch.OutOfMemoryError):
        empty.gather(dict(net.named_parameters()))

    assert seen == [[None] * len(list(net.parameters()))]
    assert all((one is None) == (values[name] is None) for name, one in gradients(net).items())
    assert all(torch.equal(one, values[name]) for name, one in gradients(net).items() if one is not None)


def test_a_gradient_is_freed_as_soon_as_it_is_added():
    x, weights = torch.ones(2, 300), {name: torch.ones(300, 300, requires_grad=True) for name in ("a", "b", "c")}
    buffer, seen = GradientBuffer(weights), []
    buffer.receive(lambda: None, used=[True] * 3)  # all zero

    def watch(grad):
        seen.append((weakref.ref(grad), [one() is None for one, _ in seen]))

    for one in weights.values():
        one.register_hook(watch)
    output = x @ weights["a"] @ weights["b"] @ weights["c"]
    used, of_inputs = differentiate([output], leaves=weights, inputs=[], incoming=[torch.ones(2, 300)], buffer=buffer)

    assert (used, of_inputs) == ([True] * 3, [])
    assert all(all(gone) for _, gone in seen)
    assert torch.equal(buffer.places["c"], (x @ weights["a"] @ weights["b"]).T @ torch.ones(2, 300))


def test_small_gradients_share_one_addition():
    weights = {"first": torch.ones(4, 4, requires_grad=True), "second": torch.ones(4, 4, requires_grad=True)}
    weights["unused"] = torch.ones(4, 4, requires_grad=True)
    buffer, added = GradientBuffer(weights), []
    output = torch.ones(2, 4) @ weights["first"] @ weights["second"]
    used, _ = differentiate(
        [output],
        leaves=weights,
        inputs=[],
        incoming=[torch.ones(2, 4)],
        buffer=buffer,
        put=lambda places, gradients: added.append(len(places)),
    )

    assert (used, added) == ([True, True, False], [2])


def test_gradients_of_several_dtypes_are_each_in_their_own():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, dtype=torch.float64))
    net[1].register_parameter("scale", nn.Parameter(torch.ones(4)))
    net.forward = lambda x: net[1](net[0](x).double()).float() * net[1].scale
    plain, x = copy.deepcopy(net), torch.randn(2, 4)
    RecordedCalls(net)
    settle(net, x)
    net(x).sum().backward()
    plain[1](plain[0](x).double()).float().mul(plain[1].scale).sum().backward()

    assert [one.grad.dtype for one in net.parameters()] == [one.dtype for one in net.parameters()]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_hooks_of_parameters_run_at_every_replay(net):
    seen = []
    net.first.weight.register_hook(lambda grad: seen.append(grad.shape))
    RecordedCalls(net)
    settle(net, IDS)
    before = len(seen)
    step(net)

    assert len(seen) == before + 1


def test_an_input_that_is_differentiated_gets_its_gradient():
    net = nn.Linear(4, 4)
    RecordedCalls(net)
    x = torch.randn(2, 4, requires_grad=True)
    settle(net, x)
    x.grad = None
    net(x).sum().backward()

    assert torch.allclose(x.grad, net.weight.sum(0).expand(2, 4))
