"""Kernels of compiled graphs: which operations share one, and what a step of compiled code takes."""

import gc

import lightning as L
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from lightning_unified import predict
from lightning_unified.planner.fake.compiled.kernels import kernels_of
from lightning_unified.planner.fake.compiled.order import ordered
from lightning_unified.planner.fake.compiled.reuse import memory_kept

SIZE = 8


def kernels(function, count):
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(SIZE, SIZE) for _ in range(count))).graph
    found, returned = kernels_of(graph)
    return [[node.name for node in kernel.nodes] for kernel in ordered(found, returned)]


def test_results_that_read_the_same_tensors_share_a_kernel():
    def gated(a, b, weight):
        return (a * b) @ weight + (a + b) @ weight

    assert kernels(gated, 3) == [["mul", "add"], ["mm"], ["mm_1"], ["add_1"]]


def test_a_result_that_waits_for_a_library_call_has_a_kernel_of_its_own():
    def chained(a, weight):
        return (a + (a * 2) @ weight) @ weight

    assert kernels(chained, 2) == [["mul"], ["mm"], ["add"], ["mm_1"]]


def test_loops_of_other_sizes_are_not_fused():
    def sliced(a, weight):
        return (a[:2] * 3) @ weight, (a * 2) @ weight

    assert ["mul", "mul_1"] not in kernels(sliced, 2)


def test_a_result_that_only_its_own_kernel_reads_is_not_stored():
    def chained(a, weight):
        return torch.exp(torch.sin(a) * 2) @ weight

    assert kernels(chained, 2) == [["exp"], ["mm"]]


def test_the_kernel_that_frees_most_runs_first():
    def wide(a, weight):
        first, second = a @ weight, a @ weight.t()
        return first.sum(), second.sum()

    order = kernels(wide, 2)
    assert order.index(["sum_1"]) < order.index(["mm_1"])  # the first product ends before the second begins


def test_a_result_of_many_tensors_with_two_uses_is_stored():
    def summed(a, b, c, d, e, weight):
        total = a + b + c + d + e
        return torch.exp(total) @ weight, torch.sin(total) @ weight

    def few(a, b, weight):
        total = a + b
        return torch.exp(total) @ weight, torch.sin(total) @ weight

    assert any("add_3" in kernel for kernel in kernels(summed, 6))
    assert not any("add" in kernel for kernel in kernels(few, 3))


def kept(function, count):
    """Return the names of tensors whose memory is kept, with the results that take it."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(SIZE, SIZE) for _ in range(count))).graph
    found, returned = kernels_of(graph)
    order = ordered(found, returned)
    last = {one: at for at, kernel in enumerate(order) for one in (*kernel.sources, *kernel.results)}
    ends = [[one for one, end in last.items() if end == at and one not in returned] for at in range(len(order))]
    return {one.name: result.name for one, result in memory_kept(order, returned, ends=ends).items()}


def test_memory_is_kept_for_a_later_result_of_its_size():
    def chained(a, weight):
        return (((a @ weight) @ weight) @ weight) @ weight

    assert kept(chained, 2) == {"mm": "mm_2", "mm_1": "mm_3"}


def test_memory_is_not_kept_where_the_peak_would_rise():
    def wide(a, weight):
        first = (a @ weight).t() @ weight  # its operand ends here
        large = torch.cat([first] * 8)
        return (large @ weight).sum(0) @ weight, (first @ weight) @ weight

    assert "mm" not in kept(wide, 2)


def test_a_graph_that_computes_nothing_has_no_kernels():
    assert kernels(lambda a: a.view(-1), 1) == []
    assert kept(lambda a: a.view(-1), 1) == {}


def test_memory_of_inputs_is_not_kept():
    def chained(a, weight):
        return (a @ weight).relu()

    assert kept(chained, 2) == {}


class Gelu(nn.Module):
    def __init__(self, width=64, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), self.dropout)


class Gated(Gelu):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 256)

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


@torch.library.custom_op("lightning_unified_tests::add_rows", mutates_args={"total"})
def add_rows(total: torch.Tensor, rows: torch.Tensor) -> None:
    total.add_(rows)


class Counting(Gelu):
    """Has an operator of a library that writes a large buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(64, 128, 64))

    def forward(self, x):
        add_rows(self.total, x.detach())
        return super().forward(x)


class Blocks(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.Sequential(*(kind() for _ in range(2)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_an_operator_that_writes_its_argument_copies_nothing():
    def peak(kind):
        module = Blocks(kind)
        for block in module.blocks:
            block.compile()
        return predict(module, torch.ones(64, 128, 64), device="cpu").peak_bytes

    buffers = 2 * 64 * 128 * 64 * 4
    assert peak(Counting) == pytest.approx(peak(Gelu) + buffers, abs=4096)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gelu, Gated, lambda: Gelu(dropout=0.1)], ids=["gelu", "gated", "dropout"])
def test_a_compiled_step_takes_what_is_predicted(kind):
    torch.compiler.reset()
    module, batch = Blocks(kind), torch.ones(64, 128, 64)
    for block in module.blocks:
        block.compile()
    predicted = predict(module, batch, device="cpu").peak_bytes

    for _ in range(2):  # compiles
        module.training_step(batch, 0).backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module.training_step(batch, 0).backward()
    now = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    held = sum(2 * one.nbytes for one in module.parameters()) + batch.nbytes  # weights with gradients
    assert predicted == pytest.approx(held + peak, rel=0.02)
