"""What the recorder makes of operations."""

import copy
import gc
import sys
from collections import OrderedDict
from types import ModuleType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_unified.cost_model.trace.trace import Give, Take, Work
from lightning_unified.planner.fake.fake_copy import fake_copy
from lightning_unified.planner.fake.mode import fake_world
from lightning_unified.planner.fake.places import Places
from lightning_unified.planner.fake.recorder import Recorder

CPU = torch.device("cpu")


def recorded(run, **options):
    recorder = Recorder(**{"backend": "cpu", **options})
    with recorder:
        recorder.begin()
        run(recorder)
    return recorder.stop()


def test_a_view_takes_nothing_and_moves_nothing():
    start = torch.ones(4, 4)
    events = recorded(lambda _: start.view(2, 8).t()[0])
    assert [event for event in events if isinstance(event, Work)] == [Work(op="", phase="setup")]


def test_a_result_is_taken_after_its_work_and_given_when_nothing_refers_to_it():
    start = torch.ones(4, 4)

    def run(_):
        made = start * 2
        del made

    _, work, take, give = recorded(run)
    assert work == Work("aten.mul.Tensor", "setup", "", 0, 128, "float32")
    assert take.bytes == 64 and give == Give(take.storage)


def test_a_mean_loss_holds_its_entries_beside_what_its_result_keeps():
    blocks, peak = {}, 0
    with fake_world():
        x = torch.ones(256)
        events = recorded(lambda _: torch.nn.functional.mse_loss(x, x))
    for event in events:
        if isinstance(event, Take):
            blocks[event.storage] = event.bytes
        elif isinstance(event, Give):
            del blocks[event.storage]
        peak = max(peak, sum(blocks.values()))

    assert peak == 2 * x.nbytes + 4  # a CPU's profiler reports 2,060: two more scalars


def test_gradients_that_meet_are_added_in_place_as_they_are_without_a_recorder():
    x = torch.ones(64, requires_grad=True)

    def run(recorder):
        y = x * 2
        z = y.sin() + y.cos()
        recorder.backward_begins()
        z.backward(torch.ones(64))

    events = recorded(run)
    index = next(
        i for i, e in enumerate(events) if isinstance(e, Work) and e.op == "aten.add.Tensor" and e.phase == "backward"
    )
    assert not isinstance(events[index + 1], Take)


def test_a_tied_table_has_three_gradients_because_a_view_is_not_added_in_place():
    with fake_world():
        table, chosen = torch.ones(64, 4, requires_grad=True), torch.zeros(8, dtype=torch.long)

        def run(recorder):
            loss = (torch.nn.functional.embedding(chosen, table) @ table.t()).sum()
            recorder.backward_begins()
            loss.backward()

        events = recorded(run)
    index = next(i for i, e in enumerate(events) if isinstance(e, Work) and e.op == "aten.add.Tensor")
    assert [type(event) for event in events[index + 1 : index + 4]] == [Take, Give, Give]


def test_gradients_of_indexed_entries_are_written_in_place_as_without_a_recorder():
    with fake_world():
        x, chosen = torch.ones(64, 4, requires_grad=True), torch.zeros(32, dtype=torch.long)

        def run(recorder):
            y = x[chosen].sum()
            recorder.backward_begins()
            y.backward()

        events = recorded(run)
    index = next(i for i, e in enumerate(events) if isinstance(e, Work) and e.op == "aten.index_put.default")
    assert not any(isinstance(event, Take) for event in events[index + 1 :])


def test_a_dropouts_mask_is_taken_before_its_result():
    x = torch.ones(64)
    events = recorded(lambda _: torch.native_dropout(x, 0.5, train=True))
    index = next(i for i, e in enumerate(events) if isinstance(e, Work) and e.op == "aten.native_dropout.default")
    assert [event.bytes for event in events[index + 1 : index + 3]] == [64, 256]


def test_what_a_kernel_gives_back_it_takes_after_its_result():
    gradient = torch.ones(8, 16)

    def run(_):
        return torch.ops.aten._softmax_backward_data(gradient, gradient, -1, torch.float32)

    events = recorded(run, backend="cuda")
    result, product, end = events[-4:-1]
    assert (result.bytes, product.bytes) == (8 * 16 * 4, 8 * 16 * 4)
    assert end == Give(product.storage)


def test_a_library_that_looks_for_fakes_takes_none_for_a_compiler(monkeypatch):
    library = ModuleType("transformers.utils.import_utils")
    library.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    with fake_world():
        fake = torch.empty(2)
        assert not library.is_fake_tensor(fake)
    assert library.is_fake_tensor(fake)


def test_a_fake_tensor_can_be_copied_deeply_formatted_and_made_an_array():
    with fake_world() as (_, answers):
        one = nn.Parameter(torch.zeros(3)[:2])
        other = copy.deepcopy(one)
        assert other.shape == (2,) and other.requires_grad and isinstance(other, nn.Parameter)
        assert f"{torch.randn(3).sum():.2f}" == "1.00"
        assert torch.randn(2, 3).numpy().shape == (2, 3)
        assert torch.tensor([3, 4]).numpy().tolist() == [3, 4]
    assert [read.shapes for read in answers.reads] == [False, True]


def test_a_fake_module_is_moved_and_cast_with_its_ties():
    with fake_world():
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        net.to(torch.bfloat16)
        assert net[0].weight is net[1].weight
        assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}


def test_counters_are_known_through_operations_in_place():
    with fake_world() as (_, answers):
        count = torch.zeros(())
        count += 2
        view = count.view(1)
        view.mul_(3)
        assert count.item() == 6
        count.copy_(torch.randn(()))
        assert count.item() == 1
    assert len(answers.reads) == 1


def test_a_fake_copy_keeps_ties_views_flags_and_what_cannot_be_copied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net.eval()
    net.whole = torch.arange(6)
    net.part = net.whole[2:4]
    net.endless = (number for number in range(3))
    net.noted = OrderedDict()
    net.noted.note = "kept"
    with fake_world():
        twin = fake_copy(net, device=CPU)
        assert twin[0].weight is twin[1].weight
        assert twin.part.untyped_storage()._cdata == twin.whole.untyped_storage()._cdata
        assert int(twin.part.sum()) == 5
    assert not twin[0].bias.requires_grad
    assert not twin.training
    assert twin.endless is net.endless
    assert twin.noted is not net.noted
    assert twin.noted.note == "kept"
    assert twin[0]._forward_hooks is not net[0]._forward_hooks
    assert type(twin[0].weight) is not type(net[0].weight)


def test_places_follow_calls_without_hooks():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    places = Places(net)
    recorder = Recorder(backend="cpu", place=places.here)
    call = nn.Module.__call__
    with places.followed(), recorder:
        recorder.begin()
        loss = net(torch.ones(1, 2)).sum()
        recorder.backward_begins()
        loss.backward()
    works = [event for event in recorder.stop() if isinstance(event, Work)]
    assert {work.place for work in works if "addmm" in work.op or "threshold" in work.op} == {"0", "1"}
    assert nn.Module.__call__ is call
    gc.collect()
