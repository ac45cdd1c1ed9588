"""When calls are replayed and when they run eagerly.

Python stands in for the replay and repeats the call.
"""

import copy
import io
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_unified.nn.cuda_graphs import RecordedCalls, eager_calls, is_recorded, release_recordings, shapes
from lightning_unified.nn.cuda_graphs import graphs as cuda_graphs
from lightning_unified.nn.cuda_graphs.gradient_buffer import GradientBuffer, differentiate
from lightning_unified.nn.cuda_graphs.recording import Recording, call_of
from lightning_unified.nn.cuda_graphs.shapes import SETTLED
from lightning_unified.nn.recomputing import Recomputing

pytestmark = pytest.mark.usefixtures("graphs_by_python")
IDS = torch.arange(24).reshape(4, 6)


class Net(nn.Module):
    """Two layers with dropout, tied weights, a frozen table and a parameter that is not used."""

    def __init__(self, width=16, *, dropout=0.0):
        super().__init__()
        self.table, self.first = nn.Embedding(50, width), nn.Linear(width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight
        self.frozen, self.unused = nn.Embedding(50, width).requires_grad_(False), nn.Parameter(torch.zeros(3))

    def forward(self, ids, scale=None):
        x = self.table(ids) + self.frozen(ids)
        x = self.norm(self.drop(self.first(x).relu()))
        return self.head(x if scale is None else x * scale)


def settle(network, *calls, times=None):
    """Train on each of the calls until all are recorded, or so many times."""
    for _ in range(times or SETTLED + 1):
        for call in calls:
            network(call).sum().backward()
    network.zero_grad()


def gradients(network):
    return {name: None if one.grad is None else one.grad.clone() for name, one in network.named_parameters()}


@pytest.fixture
def net():
    return Net()


def step(net, ids=IDS, **kwargs):
    loss = net(ids, **kwargs).float().square().mean()
    loss.backward()
    return loss.item()


def calls_of(net):
    """Return a list that grows whenever the forward of `net` runs eagerly."""
    ran, forward = [], net.forward
    net.forward = lambda *args, **kwargs: (ran.append(1), forward(*args, **kwargs))[1]
    return ran


def test_a_shape_is_recorded_once_nothing_new_has_come_for_a_while(net):
    recorded = RecordedCalls(net)
    counts = [(step(net), recorded.recorded)[1] for _ in range(SETTLED + 2)]

    assert counts == [0] * SETTLED + [1, 1]
    assert is_recorded(nn.Sequential(net))


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_and_gradients_are_those_of_eager_calls(net, autocast):
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    settle(net, IDS)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        settle(net, IDS)
        losses = [step(one, ids) for ids in (IDS, IDS + 3) for one in (net, plain)]

    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    ours, theirs = gradients(net), gradients(plain)
    assert ours["unused"] is None
    assert ours["frozen.weight"] is None
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if theirs[name] is not None)


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
    for _ in range(SETTLED + 1):
        for one in (net, plain):
            one.zero_grad()
            step(one)
            kept = net.first.weight.grad
    before = gradients(net)
    net(IDS)  # recorded by now
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


def test_a_gradient_is_freed_as_soon_as_it_is_added():
    x, weights = torch.ones(2, 4), {name: torch.ones(4, 4, requires_grad=True) for name in ("a", "b", "c")}
    buffer, seen = GradientBuffer(weights), []
    buffer.receive(lambda: None, used=[True] * 3)  # all zero

    def watch(grad):
        seen.append((weakref.ref(grad), [one() is None for one, _ in seen]))

    for one in weights.values():
        one.register_hook(watch)
    output = x @ weights["a"] @ weights["b"] @ weights["c"]
    used, of_inputs = differentiate([output], leaves=weights, inputs=[], incoming=[torch.ones(2, 4)], buffer=buffer)

    assert (used, of_inputs) == ([True] * 3, [])
    assert all(all(gone) for _, gone in seen)
    assert torch.equal(buffer.places["c"], (x @ weights["a"] @ weights["b"]).T @ torch.ones(2, 4))


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


def test_a_new_shape_gives_the_recordings_back_and_all_are_made_again(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    step(net, IDS[:, :3])
    assert recorded.recorded == 0

    settle(net, IDS, IDS[:, :3])
    assert recorded.recorded == 2


def test_a_shape_that_came_only_once_is_recorded_when_it_comes_again(net):
    recorded = RecordedCalls(net)
    step(net, IDS[:2])
    settle(net, IDS)
    assert recorded.recorded == 1

    step(net, IDS[:2])
    assert recorded.recorded == 2


def test_more_shapes_than_allowed_run_eagerly_and_that_is_said_once(net, caplog):
    recorded = RecordedCalls(net, most=1)
    settle(net, IDS)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        step(net, IDS[:2])
        step(net, IDS[:3])

    assert recorded.recorded == 1
    assert caplog.text.count("more than 1 shapes") == 1


def test_a_shape_that_comes_no_more_makes_place_for_another(net, monkeypatch):
    monkeypatch.setattr(shapes, "_STALE", SETTLED)
    recorded = RecordedCalls(net, most=2)
    settle(net, IDS, IDS[:2])
    settle(net, IDS)
    assert recorded.recorded == 2
    settle(net, IDS, IDS[:3])

    assert recorded.recorded == 2
    assert len(recorded._shapes._examples) == 2


def test_a_call_while_another_waits_for_its_backward_pass_runs_eagerly(net):
    plain, ran = copy.deepcopy(net), calls_of(net)
    RecordedCalls(net)
    settle(net, IDS, IDS[:2])
    ran.clear()
    waiting = net(IDS).sum()
    runs_of_graphs = len(ran)
    second = net(IDS[:2]).sum()

    assert len(ran) == runs_of_graphs + 1
    (waiting + second).backward()
    (plain(IDS).sum() + plain(IDS[:2]).sum()).backward()
    assert torch.allclose(net.first.weight.grad, plain.first.weight.grad)


def test_a_recorded_call_whose_result_is_dropped_is_not_waited_for(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    net(IDS)

    assert not recorded._waits


def test_a_second_backward_pass_is_refused(net):
    RecordedCalls(net)
    settle(net, IDS)
    loss = net(IDS).sum()
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize(
    "way", ["eval", "no grad", "fakes", "saved tensors", "anomalies", "vmap", "a class of tensors", "a list"]
)
def test_calls_that_no_graph_can_serve_run_eagerly(net, way, monkeypatch):
    RecordedCalls(net)
    settle(net, IDS)
    monkeypatch.setattr(Recording, "replay", lambda *_, **__: pytest.fail("it was replayed"))
    if way == "eval":
        net.eval()(IDS)
    elif way == "no grad":
        with torch.no_grad():
            net(IDS)
    elif way == "fakes":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            net(mode.from_tensor(IDS))
    elif way == "saved tensors":
        with torch.autograd.graph.save_on_cpu():
            net(IDS)
    elif way == "anomalies":
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            net(IDS)
    elif way == "vmap":
        torch.func.vmap(net)(IDS)
    elif way == "a class of tensors":
        net(IDS, scale=nn.Parameter(torch.ones(1)))
    else:
        assert call_of(([IDS],), {}, device=torch.device("cpu")) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_eager(net, copied):
    RecordedCalls(net)

    assert copied(net)._compiled_call_impl is None


def test_what_is_saved_with_torch_save_is_eager(net):
    RecordedCalls(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)

    assert torch.load(file, weights_only=False)._compiled_call_impl is None


def test_removed_it_leaves_the_network_as_it_was(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    recorded.remove()
    recorded.remove()

    assert net._compiled_call_impl is None
    assert not recorded.gradients


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.first.weight, "data", net.first.weight.data.clone()),
        lambda net: net.first.weight.requires_grad_(False),
        lambda net: net.drop.eval(),
        lambda net: net.double(),
    ],
    ids=["weights swapped", "frozen", "mode", "dtype"],
)
def test_another_network_releases_the_recordings_and_the_next_steps_are_right(net, change):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    change(net)
    step(net)
    assert recorded.recorded == 0

    settle(net, IDS)
    assert recorded.recorded == 1
    plain = copy.deepcopy(net)
    assert step(net) == step(plain)
    torch.testing.assert_close(net.table.weight.grad, plain.table.weight.grad, rtol=0, atol=0)


def test_recomputed_blocks_stay_eager_for_as_long_as_they_are_and_that_is_said(caplog):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    recorded = RecordedCalls(net)
    x = torch.randn(2, 4)
    settle(net, x)
    with caplog.at_level(logging.WARNING, "lightning_unified"), Recomputing([net[0]]):
        settle(net, x)
        assert recorded.recorded == 0
        assert "recomputes its activations" in caplog.text
    settle(net, x)

    assert recorded.recorded == 1


def test_buffers_that_a_replay_writes_show_it_in_their_version():
    net = nn.BatchNorm1d(4)
    RecordedCalls(net)
    x = torch.randn(8, 4)
    settle(net, x)
    version = net.num_batches_tracked._version
    net(x).sum().backward()

    assert net.num_batches_tracked._version > version


def test_memory_that_runs_out_while_recording_leaves_nothing_and_goes_on(net, monkeypatch):
    recorded = RecordedCalls(net)
    settle(net, IDS)

    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "record", runs_out)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            settle(net, IDS[:2])
    assert recorded.recorded == 0

    settle(net, IDS[:2])
    assert recorded.recorded == 1  # and not the one before, which may be what was too large


def test_memory_that_runs_out_twice_while_recording_ends_no_run(net, monkeypatch, caplog):
    plain, recorded = copy.deepcopy(net), RecordedCalls(net)

    def runs_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "record", runs_out)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        settle(net, IDS)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        settle(net, IDS[:2], times=3 * SETTLED)

    assert (recorded.recorded, recorded.gradients) == (0, [])
    assert caplog.text.count("memory has run out twice") == 1
    net.drop.training = False  # another network to look at
    assert step(net) == step(plain)


def test_recordings_are_released_from_outside_and_made_again(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    release_recordings(nn.Sequential(net))
    assert recorded.recorded == 0

    settle(net, IDS)
    assert recorded.recorded == 1


def test_where_calls_are_to_be_eager_nothing_is_looked_at_or_forgotten(net, monkeypatch):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    with eager_calls(), monkeypatch.context() as patch:
        patch.setattr(Recording, "replay", None)
        net.drop.training = False  # another network, were it looked at
        step(net)
        step(net, IDS[:2])  # another shape
        net.drop.training = True
    step(net)

    assert recorded.recorded == 1


def test_outputs_come_in_the_structure_that_the_network_returns():
    class Two(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "none": None, "ids": x.argmax(-1)}

    net = Two(4, 4)
    RecordedCalls(net)
    x = torch.randn(3, 4)
    for _ in range(SETTLED + 2):
        found = net(x)
        found["y"].sum().backward()

    assert set(found) == {"y", "none", "ids"}
    assert found["none"] is None
    assert torch.equal(found["ids"], x.argmax(-1))
    assert is_recorded(net)


def test_a_network_without_trained_parameters_is_refused():
    with pytest.raises(ValueError, match="no trained parameter"):
        RecordedCalls(nn.Linear(2, 2).requires_grad_(False))


def test_a_network_that_is_stood_in_for_is_refused(net):
    RecordedCalls(net)
    with pytest.raises(ValueError, match="replaced already"):
        RecordedCalls(net)
