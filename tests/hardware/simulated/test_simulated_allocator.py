"""A simulated allocator counts, rounds and raises as its backend does."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified.errors import HostFrozenError
from lightning_unified.hardware import cap_allocator, resolve_budget
from lightning_unified.hardware.allocators.metal import MetalHeaps
from lightning_unified.hardware.allocators.pools import CudaSegments
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.hardware.simulated import SimulatedMachine

KIB, MIB, GIB = 2**10, 2**20, 2**30
CARD = "rtx3060-12gb"  # its blocks are exact: freed ones are split
TORCHES = ("2.13.0", "2.14.1")  # the two allocators of MPS


def floats(count):
    return torch.empty(count // 4)


def capped(name, amount, **kwargs):
    machine = SimulatedMachine(name, **kwargs)
    cap_allocator(machine.device, resolve_budget(amount, machine.reading()), sources=machine.sources)
    return machine


def fill(machine, size):
    for _ in range(1000):
        machine.allocator.allocate(size)  # takes no memory of the real machine


def refused(machine, size):
    """Allocate blocks of `size` until the machine refuses; return what it raised."""
    with pytest.raises(Exception, match=r"memory|freeze|buffer") as caught:
        fill(machine, size)
    return caught.value


@pytest.fixture
def card():
    return SimulatedMachine(CARD)


def test_a_tensor_counts_until_nothing_holds_it(card):
    with card.active():
        whole = floats(MIB)
        part = whole.view(2, -1)[1:]
        counted = [card.allocator.allocated]
        del whole
        counted.append(card.allocator.allocated)
        del part
        counted.append(card.allocator.allocated)

    assert counted == [MIB, MIB, 0]


def test_views_and_writing_in_place_add_nothing(card):
    with card.active():
        x = floats(MIB)
        x.add_(1).mul_(2)
        views = [x.view(-1, 64), x[10:], x.expand(4, -1), x.view(-1, 64).t(), x.detach(), x.to(torch.float32)]
        torch.add(x, 1, out=x)

    assert card.allocator.peak == MIB
    assert len(views) == 6


def test_a_copy_counts_and_a_conversion_counts_its_own_width(card):
    with card.active():
        x = floats(MIB)
        copies = [x.clone(), x.to(torch.bfloat16), x.double()]

    assert card.allocator.allocated == MIB + MIB + MIB // 2 + 2 * MIB
    assert len(copies) == 3


def test_what_autograd_keeps_counts_until_backward_has_used_it(card):
    with card.active():
        x = floats(MIB).requires_grad_()
        y = x.exp().exp().exp().sum()  # each keeps its result
        kept = card.allocator.allocated
        y.backward()
        y = None
        after = card.allocator.allocated

    assert kept == 4 * MIB + 512
    assert after == 2 * MIB  # x and its gradient


def test_the_peak_of_a_linear_step_is_the_one_counted_by_hand(card):
    layer, x = torch.nn.Linear(512, 1024, bias=False), torch.randn(256, 512)
    with card.active(holding=layer.parameters()):
        assert card.allocator.allocated == 2 * MIB  # the weight
        loss = layer(x).square().sum()
        forward = card.allocator.allocated
        loss.backward()

    # weight 2, x 0.5, output 1, its square only until summed; loss
    assert forward == int(3.5 * MIB) + 512
    # backward: 3.5 + loss and its gradient + the output's gradient: power 1, times 2 1, times the incoming 1, then the weight's 2
    assert card.allocator.peak == pytest.approx(int(6.5 * MIB), abs=MIB + 2 * KIB)
    assert card.allocator.allocated == 2 * MIB + 2 * MIB + MIB // 2 + 512


def test_parameters_count_from_their_first_use_where_nobody_named_them(card):
    layer, x = torch.nn.Linear(512, 512, bias=False), floats(256 * KIB).view(128, 512)
    with card.active(), torch.no_grad():
        layer(x)

    assert card.allocator.peak == MIB + 256 * KIB + 256 * KIB


def test_a_data_set_that_is_only_sliced_does_not_count(card):
    rows = torch.randn(1024, 1024)
    with card.active():
        batches = list(DataLoader(rows, batch_size=64))

    assert card.allocator.peak <= sum(batch.nbytes for batch in batches)
    assert card.allocator.allocated == rows.nbytes  # sixteen stacked batches of 64


def test_a_row_of_a_data_set_counts_as_a_row_when_it_meets_a_parameter(card):
    rows, layer = torch.randn(1024, 128), torch.nn.Linear(128, 1, bias=False)
    with card.active(), torch.no_grad():
        layer(rows[:2])

    assert card.allocator.peak == 512 + 1024 + 512


def test_a_tensor_that_is_resized_counts_as_large_as_it_is(card):
    with card.active():
        x = floats(MIB)
        x.resize_(2 * MIB // 4)

    assert card.allocator.allocated == 2 * MIB


def test_forgetting_leaves_the_tensors_and_counts_nothing(card):
    with card.active():
        x = floats(MIB)
        card.forget()
        assert card.allocator.allocated == 0
        del x
        y = floats(MIB)

    assert card.allocator.allocated == y.nbytes


def test_nothing_counts_after_an_error_has_left_the_block(card):
    with pytest.raises(ValueError, match="of the test's own"), card.active():
        raise ValueError("of the test's own")
    floats(MIB)

    assert card.allocator.peak == 0


def test_meta_and_fake_tensors_count_nothing(card):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with card.active(), FakeTensorMode():
        torch.empty(MIB).exp()
    with card.active():
        torch.empty(MIB, device="meta").exp()

    assert card.allocator.peak == 0


def test_the_place_of_the_peak_names_the_operation_and_the_line(card):
    with card.active() as live:
        x = floats(MIB).requires_grad_()
        x.sigmoid().sum().backward()

    assert "aten.sigmoid_backward.default in the backward of Sigmoid" in live.peak_place
    assert f"{__file__}:" in live.peak_place


@pytest.mark.parametrize(
    ("module", "is_named"),
    [("lightning_unified.nn.linear_cross_entropy", False), ("lightning_unified.models.gearhead.network", True)],
)
def test_the_place_of_the_peak_is_a_models_line_not_an_operators(card, module, is_named):
    importlib.import_module(module)
    space = {"__name__": module}
    exec(compile("def call(function, size):\n    return function(size)\n", "here.py", "exec"), space)

    with card.active() as live:
        space["call"](torch.empty, MIB)

    assert ("here.py:2" if is_named else f"{__file__}:") in live.peak_place


@pytest.mark.parametrize(
    ("machine", "version", "kind", "texts"),
    [
        *(
            (
                "m2-16gb",
                version,
                RuntimeError,
                (
                    "MPS backend out of memory (MPS allocated: 96.00 MiB, other allocations: 384.00 KiB, max allowed: 100.00 MiB). ",
                    "Tried to allocate 8.00 MiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 ",
                ),
            )
            for version in TORCHES
        ),
        (
            CARD,
            None,
            torch.OutOfMemoryError,
            (
                "CUDA out of memory. Tried to allocate 8.00 MiB. GPU 0 has a total capacity of 11.63 GiB of which 11.24 GiB is free. ",
                "Including non-PyTorch memory, this process has 400.00 MiB memory in use. 100.00 MiB allowed; ",
                "80.00 MiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated.",
            ),
        ),
        ("rx6750xt-12gb", None, torch.OutOfMemoryError, ("HIP out of memory. Tried to allocate 8.00 MiB.",)),
        ("gb10-128gb", None, torch.OutOfMemoryError, ("CUDA out of memory.",)),
    ],
)
def test_above_its_cap_a_machine_raises_its_backends_own_error(machine, version, kind, texts):
    machine = capped(machine, "100MiB", torch_version=version)
    with machine.active(), pytest.raises(RuntimeError, match="out of memory") as caught:
        [torch.empty(8 * MIB, dtype=torch.uint8) for _ in range(20)]

    assert type(caught.value) is kind
    assert [text for text in texts if text not in str(caught.value)] == []
    assert is_out_of_memory(caught.value)


def test_a_card_without_a_cap_ends_where_its_memory_ends():
    error = refused(SimulatedMachine(CARD), 4 * GIB)

    assert type(error) is torch.OutOfMemoryError
    assert "of which 3.34 GiB is free" in str(error)


def test_a_machine_of_one_pool_without_a_cap_freezes_instead_of_raising():
    error = refused(SimulatedMachine("gb10-128gb"), 40 * GIB)

    assert type(error) is HostFrozenError
    assert not is_out_of_memory(error)


def test_an_unbounded_machine_only_counts():
    machine = SimulatedMachine("m1-8gb", bounded=False)
    machine.allocator.allocate(20 * GIB)

    assert machine.allocator.peak == 20 * GIB


def test_metal_reuses_a_freed_block_whole_and_cuda_splits_it():
    for pools, counted in ((MetalHeaps(), 5 * MIB), (CudaSegments(), 2 * MIB)):
        pools.give_back(pools.place(5 * MIB, pressed=False))
        block = pools.reuse(2 * MIB)

        assert block.size == counted


def test_cuda_joins_freed_neighbours_and_gives_whole_segments_back():
    pools = CudaSegments()
    blocks = [pools.place(6 * MIB, pressed=False)]
    blocks += [pools.reuse(6 * MIB), pools.reuse(6 * MIB)]
    pools.give_back(blocks[0])
    pools.give_back(blocks[2])
    pools.release()
    kept = pools.reserved
    pools.give_back(blocks[1])
    joined = pools.reuse(20 * MIB)

    assert kept == 20 * MIB
    assert joined.size == 20 * MIB
    pools.give_back(joined)
    pools.release()
    assert pools.reserved == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60),
    st.sampled_from([*(("m2-16gb", version) for version in TORCHES), (CARD, None)]),
)
def test_whatever_is_asked_and_freed_the_counters_agree(steps, machine):
    allocator, held = SimulatedMachine(machine[0], torch_version=machine[1]).allocator, []
    for frees, size in steps:
        if frees and held:
            allocator.free(held.pop(size % len(held)))
        else:
            held.append(allocator.allocate(size))
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved
        assert allocator.allocated <= allocator.peak
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize(("machine", "keeps"), [("m2-16gb", True), ("rtx3060-12gb", False), ("rx6750xt-12gb", True)])
def test_attention_keeps_its_scores_where_there_is_no_kernel_that_does_not(machine, keeps):
    machine = SimulatedMachine(machine)
    q = torch.randn(1, 2, 512, 8, requires_grad=True)
    with machine.active():
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    scores = 2 * 512 * 512 * 4

    assert (machine.allocator.peak >= scores) is keeps
    assert torch.backends.cuda.flash_sdp_enabled()  # as it was


def test_what_the_host_makes_does_not_count(card):
    with card.active():
        x = floats(MIB)
        with card.off_device():
            on_host = x.exp()
        y = x.exp()

    assert card.allocator.peak == card.allocator.allocated == 2 * MIB
    assert len(on_host) == len(y)
