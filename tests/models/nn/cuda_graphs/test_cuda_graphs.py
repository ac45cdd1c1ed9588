"""When calls are replayed and when they run eagerly.

Python stands in for the replay and repeats the call.
"""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_unified.nn.compiled import compiled_parts
from lightning_unified.nn.cuda_graphs import (
    RecordedCalls,
    eager_calls,
    gather_gradients,
    is_recorded,
    no_new_recordings,
    release_recordings,
    replayed_parts,
    shapes,
)
from lightning_unified.nn.cuda_graphs import graphs as cuda_graphs
from lightning_unified.nn.cuda_graphs.calls import call_of
from lightning_unified.nn.cuda_graphs.recording import Recording
from lightning_unified.nn.cuda_graphs.shapes import SETTLED
from lightning_unified.nn.recomputing import Recomputing
from tests.support.modules.recorded.cpu import IDS, calls_of, gradients, settle, step

pytestmark = pytest.mark.usefixtures("graphs_by_python")


def test_shapes_that_differ_in_rows_only_are_recorded_when_one_comes_again(net):
    recorded = RecordedCalls(net)
    counts = [(step(net, ids), recorded.recorded)[1] for ids in (IDS, IDS[:3], IDS, IDS[:3])]

    assert counts == [0, 0, 2, 2]
    assert is_recorded(nn.Sequential(net))


def test_shapes_of_several_lengths_are_recorded_once_no_new_one_comes(net):
    recorded = RecordedCalls(net)
    step(net, IDS[:, :3])
    counts = [(step(net), recorded.recorded)[1] for _ in range(SETTLED + 2)]

    assert counts == [0] * SETTLED + [1, 1]


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


def test_a_new_shape_gives_the_recordings_back_and_all_are_made_again(net):
    recorded = RecordedCalls(net)
    settle(net, IDS)
    step(net, IDS[:, :3])
    assert recorded.recorded == 0

    settle(net, IDS, IDS[:, :3])
    assert recorded.recorded == 2


def test_a_shape_that_came_only_once_is_recorded_when_it_comes_again(net):
    recorded = RecordedCalls(net)
    step(net, IDS[:, :2])
    settle(net, IDS)
    assert recorded.recorded == 1

    step(net, IDS[:, :2])
    assert recorded.recorded == 2


def test_where_gradients_are_set_aside_only_those_in_the_buffer_allow_a_recording(net):
    recorded = RecordedCalls(net)
    for gathers, count in ((False, 0), (True, 1)):
        recorded.release()
        net.zero_grad()
        step(net)
        if gathers:
            recorded.gather()
        aside = [one.grad for one in net.parameters()]
        for one in net.parameters():
            one.grad = None
        with no_new_recordings():
            net(IDS)
        assert recorded.recorded == count
        del aside


def test_gradients_of_a_new_shape_are_gathered_once_after_their_backward_pass(net):
    recorded, plain = RecordedCalls(net), copy.deepcopy(net)
    step(net)
    gather_gradients(nn.Sequential(net))
    assert recorded._buffer.is_held
    assert not recorded.has_new_shape

    step(plain)
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert own.grad is other.grad is None or torch.equal(own.grad, other.grad)


def test_no_buffer_is_made_for_gradients_that_processes_reduce(net, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "reduces", lambda: True)
    recorded = RecordedCalls(net)
    step(net)
    gather_gradients(nn.Sequential(net))

    assert recorded.gradients == []
    assert not recorded.has_new_shape


def test_a_recording_is_no_write_to_gradients_in_the_buffer(net):
    recorded = RecordedCalls(net)
    step(net)
    recorded.gather()
    versions = [None if one.grad is None else one.grad._version for one in net.parameters()]
    net(IDS)

    assert recorded.recorded == 1
    assert versions == [None if one.grad is None else one.grad._version for one in net.parameters()]


def test_inside_no_new_recordings_those_that_exist_are_replayed(net, monkeypatch):
    replayed, replay, recorded = [], Recording.replay, RecordedCalls(net)
    monkeypatch.setattr(Recording, "replay", lambda *args, **kwargs: (replayed.append(1), replay(*args, **kwargs))[1])
    with no_new_recordings():
        settle(net, IDS)
        assert recorded.recorded == 0
    settle(net, IDS)
    replayed.clear()
    with no_new_recordings():
        step(net)

    assert recorded.recorded == 1
    assert replayed == [1]


def test_a_recorded_network_is_not_a_compiled_one(net):
    RecordedCalls(net)

    assert not compiled_parts(nn.Sequential(net))
    assert replayed_parts(nn.Sequential(net)) == ("0",)
    assert replayed_parts(nn.Linear(2, 2)) == ()


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
        lambda net: setattr(net.norm, "eps", 1e-3),
        lambda net: setattr(net.first, "temperature", 2.0),
    ],
    ids=["weights swapped", "frozen", "mode", "dtype", "a number", "a new number"],
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


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["nothing drawn", "dropout"])
def test_recomputed_blocks_are_recorded_unless_the_network_draws(dropout, caplog):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout)))
    recorded = RecordedCalls(net)
    x = torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, "lightning_unified"), Recomputing([net[0]]):
        settle(net, x)
        assert recorded.recorded == (0 if dropout else 1)
    assert ("draws random numbers" in caplog.text) == bool(dropout)
    settle(net, x)

    assert recorded.recorded == 1


def test_blocks_that_recompute_by_transformers_switch_stay_eager(caplog):
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].gradient_checkpointing = True
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        recorded = RecordedCalls(net)
        settle(net, torch.randn(2, 4))

    assert recorded.recorded == 0
    assert "recomputes its activations" in caplog.text


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
