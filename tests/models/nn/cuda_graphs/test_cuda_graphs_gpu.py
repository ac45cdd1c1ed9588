"""Replays on a GPU give what eager calls give, and their memory is shared and given back."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.nn.cuda_graphs.passes import free_workspaces
from lightning_unified.nn.cuda_graphs.shapes import SETTLED
from lightning_unified.nn.recomputing import Recomputing
from lightning_unified.options.compilation import Compilation
from tests.support.modules.recorded.gpu import Block, Net, assert_same, settle, step, texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _memory_is_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_losses_and_gradients_of_every_shape_are_those_of_eager_calls(autocast):
    net = Net().cuda()
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    shapes = [texts(), texts(length=24), texts(rows=3, length=8)]
    settle(net, *shapes, autocast=autocast)

    assert recorded.recorded == 3
    for seed in range(3):
        for ids in (texts(seed=seed), texts(length=24, seed=seed), texts(rows=3, length=8, seed=seed)):
            ours, theirs = (step(one, ids, autocast=autocast) for one in (net, plain))
            assert ours == pytest.approx(theirs, rel=1e-3 if autocast else 1e-5)
    assert_same(net, plain, autocast=autocast)


def test_dropout_draws_anew_at_every_replay_and_the_same_from_the_same_seed():
    net = Net(dropout=0.5).cuda()
    RecordedCalls(net)
    ids = texts()
    settle(net, ids)

    def draw():
        out = net(ids)
        out.sum().backward()
        return out.detach()

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert not torch.equal(first, second)
    assert torch.equal(first, draw())


def test_a_replay_drops_what_an_eager_call_drops_from_the_same_seed():
    net = Net(dropout=0.5).cuda()
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    ids = texts()
    settle(net, ids)
    losses = []
    for one in (net, plain):
        torch.manual_seed(3)
        losses.append([step(one, ids) for _ in range(2)])

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(net, plain)


def test_recorded_training_follows_eager_training():
    net = Net().cuda()
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    found = []
    for one in (net, plain):
        optimizer = torch.optim.AdamW(one.parameters(), 1e-3, fused=True)
        losses = []
        for seed in range(SETTLED + 12):
            losses.append(step(one, texts(length=16 + 8 * (seed % 2), seed=seed)))
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)

    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_four_shapes_share_their_memory():
    taken = []
    for lengths in ((256,), (256, 248, 240, 232)):
        net = Net(width=256).cuda()
        recorded = RecordedCalls(net)
        before = torch.cuda.memory_reserved()
        settle(net, *(texts(64, length) for length in lengths))
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)
        assert recorded.recorded == len(lengths)
        recorded.remove()
        del net, recorded
        gc.collect()
        torch.cuda.empty_cache()

    assert taken[1] < 2 * taken[0]


def test_gradients_are_in_memory_once():
    net, ids = Net(width=256).cuda(), texts(8, 16)
    recorded = RecordedCalls(net)
    settle(net, ids)
    gradients = sum(one.nbytes for one in recorded.gradients)
    net.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step(net, ids)

    assert net.head.weight.grad is not None
    assert torch.cuda.memory_allocated() - before < gradients / 4


def test_workspaces_of_eager_passes_are_freed_unless_a_graph_may_use_them():
    x, graphs = torch.ones(64, 64, device="cuda", requires_grad=True), [torch.cuda.CUDAGraph()]
    freed = []
    for _ in range(2):
        (x @ x).sum().backward()  # each thread takes its workspace
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        free_workspaces(x.device)
        freed.append(before - torch.cuda.memory_allocated())
        graphs.clear()

    assert freed[0] == 0
    assert freed[1] >= 2**20


def test_removed_it_gives_its_memory_back():
    net = Net(width=256).cuda()
    torch.cuda.empty_cache()
    ids = texts(64, 256)
    step(net, ids)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    recorded = RecordedCalls(net)
    settle(net, ids)
    step(net, ids)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    recorded.remove()
    gc.collect()
    torch.cuda.empty_cache()

    assert torch.cuda.memory_reserved() - before < held / 2


def test_memory_that_runs_out_while_recording_is_recovered_from():
    net = Net(width=256).cuda()
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    ids, total = texts(64, 256), torch.cuda.get_device_properties(0).total_memory
    step(net, ids)
    net.zero_grad()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    with pytest.raises(torch.OutOfMemoryError):
        step(net, ids)
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()
    assert recorded.recorded == 0
    assert torch.rand(8, device="cuda").unique().numel() > 1  # the generator works

    settle(net, ids)
    assert recorded.recorded == 1
    for one in (net, plain):
        step(one, ids)
    assert_same(net, plain)


def test_recomputed_blocks_are_recorded_only_once_they_keep_activations():
    net = Net(dropout=0.1).cuda()
    recorded, ids = RecordedCalls(net), texts()
    settle(net, ids)
    assert recorded.recorded == 1
    with Recomputing(net.blocks):
        settle(net, ids)
        assert recorded.recorded == 0
    settle(net, ids)

    assert recorded.recorded == 1


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_compiled_blocks_are_recorded_and_equal_eager_ones(autocast, recomputed):
    net = Net().cuda()
    plain = copy.deepcopy(net)
    compilation = Compilation("blocks")
    compilation.begin(net)
    if recomputed:
        Recomputing(net.blocks)
    recorded = RecordedCalls(net)
    shapes = [texts(rows=5), texts(rows=3)]
    settle(net, *shapes, autocast=autocast)

    assert recorded.recorded == 2
    for seed in range(3):
        for ids in (texts(rows=5, seed=seed), texts(rows=3, seed=seed)):
            ours, theirs = (step(one, ids, autocast=autocast) for one in (net, plain))
            assert ours == pytest.approx(theirs, rel=3e-3 if autocast else 1e-5)
    assert recorded.recorded == 2
    assert_same(net, plain, autocast=autocast)
    recorded.remove()
    compilation.end()


def test_a_compiled_block_that_waits_for_the_device_stays_eager(caplog):
    class Waiting(Block):
        def forward(self, x):
            return super().forward(x) * (1.0 if x.sum().item() else 0.0)

    net = Net().cuda()
    net.blocks[0] = Waiting(64, 0.0).cuda()
    net.blocks[0].compile()
    recorded = RecordedCalls(net)
    settle(net, texts())
    assert recorded.recorded == 0
    assert "a compiled part waits for the device" in caplog.text
    step(net, texts())


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["nothing drawn", "dropout"])
def test_recomputed_blocks_are_recorded_unless_they_draw(dropout, caplog):
    net = Net(dropout=dropout).cuda()
    plain = copy.deepcopy(net)
    Recomputing(net.blocks)
    recorded = RecordedCalls(net)
    settle(net, texts())
    assert recorded.recorded == (0 if dropout else 1)
    assert ("draws random numbers" in caplog.text) == bool(dropout)
    if not dropout:
        for seed in range(2):
            assert step(net, texts(seed=seed)) == pytest.approx(step(plain, texts(seed=seed)), rel=1e-5)
        assert_same(net, plain)


def test_statistics_of_recomputed_blocks_count_every_replay_once():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(2)]
    net, x = nn.Sequential(*blocks).cuda(), torch.randn(32, 64, device="cuda")
    plain = copy.deepcopy(net)
    Recomputing(net)
    recorded = RecordedCalls(net)
    for _ in range(SETTLED + 4):
        for one in (net, plain):
            one(x).sum().backward()
    assert recorded.recorded == 1
    for (name, ours), theirs in zip(net.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-4, atol=1e-6)


def test_evaluation_between_steps_is_eager_and_disturbs_nothing():
    net = Net(dropout=0.5).cuda()
    plain = copy.deepcopy(net).eval()
    RecordedCalls(net)
    ids = texts()
    settle(net, ids)
    losses = []
    for evaluates in (False, True):
        torch.manual_seed(3)
        loss = net(ids).sum()
        if evaluates:
            with torch.no_grad():
                torch.testing.assert_close(net.eval()(ids), plain(ids), rtol=1e-4, atol=1e-5)
            net.train()
        loss.backward()
        losses.append((loss.item(), net.table.weight.grad.clone()))
        net.zero_grad()

    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1])


def test_swapped_weights_are_the_ones_that_train():
    net = Net().cuda()
    recorded, ids = RecordedCalls(net), texts()
    settle(net, ids)
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5
    plain = copy.deepcopy(net)
    assert step(net, ids) == pytest.approx(step(plain, ids), rel=1e-5)
    assert recorded.recorded == 0

    net.zero_grad()
    settle(net, ids)
    step(net, ids)
    assert recorded.recorded == 1
    assert_same(net, plain)


def test_weights_written_in_place_are_the_ones_that_train():
    net = Net().cuda()
    recorded, ids = RecordedCalls(net), texts()
    settle(net, ids)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    plain = copy.deepcopy(net)

    assert step(net, ids) == pytest.approx(step(plain, ids), rel=1e-5)
    assert recorded.recorded == 1
    assert_same(net, plain)


def test_two_calls_before_one_backward_pass_do_not_write_over_each_other():
    net = Net().cuda()
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    short, long = texts(length=8), texts(length=24)
    settle(net, short, long)
    assert recorded.recorded == 2
    for one in (net, plain):
        (one(long).square().mean() + one(short).square().mean() + one(long).square().mean()).backward()

    assert_same(net, plain)


def test_running_statistics_count_every_replay_once():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).cuda()
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    for seed in range(SETTLED + 4):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).cuda()
        for one in (net, plain):
            one(x).square().mean().backward()

    assert recorded.recorded == 1
    assert net[1].num_batches_tracked.item() == SETTLED + 4
    torch.testing.assert_close(net[1].running_var, plain[1].running_var)
    torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad, rtol=1e-4, atol=1e-5)


def test_recorded_parts_hand_gradients_on_to_each_other():
    parts = [nn.Linear(16, 16).cuda(), nn.Linear(16, 1).cuda()]
    plain = copy.deepcopy(parts)
    recorded = [RecordedCalls(part) for part in parts]
    for seed in range(SETTLED + 4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).cuda()
        for first, second in (parts, plain):
            second(first(x).relu()).square().mean().backward()

    assert [one.recorded for one in recorded] == [1, 1]
    for ours, theirs in zip(parts, plain, strict=True):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-6)


def test_gradients_accumulate_over_micro_batches():
    net = Net().cuda()
    plain = copy.deepcopy(net)
    RecordedCalls(net)
    settle(net, texts())
    for one in (net, plain):
        for seed in range(4):
            step(one, texts(seed=seed))

    assert_same(net, plain)


def test_an_encoder_of_transformers_is_recorded_with_its_mask():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    net = transformers.BertForSequenceClassification(config).cuda().train()
    plain = copy.deepcopy(net)
    recorded = RecordedCalls(net)
    mask = torch.ones(4, 16, dtype=torch.long, device="cuda")
    mask[1, 9:] = 0
    for seed in range(SETTLED + 3):
        for one in (net, plain):
            with torch.autocast("cuda", torch.bfloat16):
                one(input_ids=texts(seed=seed), attention_mask=mask).logits.float().square().mean().backward()

    assert recorded.recorded == 1
    assert_same(net, plain, autocast=True)


def test_a_thread_that_pins_batches_meanwhile_does_not_spoil_a_recording():
    net, over, failed = Net().cuda(), threading.Event(), []
    recorded = RecordedCalls(net)

    def pin():
        size = 1
        while not over.is_set():
            try:
                torch.empty(size << 16).pin_memory().cuda(non_blocking=True)
            except RuntimeError as error:
                failed.append(error)
                return
            size = size % 64 + 1

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        settle(net, texts(), texts(length=24))
    finally:
        over.set()
        thread.join()

    assert not failed
    assert recorded.recorded == 2
