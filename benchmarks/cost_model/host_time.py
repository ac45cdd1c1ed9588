"""Host time of compiled and of recomputed blocks, in launches of one operation.

Twelve narrow transformer blocks run forward and backward on a GPU, with so little arithmetic that the host is the slower side. The unit is
the host's time of one eager operation on the same machine (`measure_rates`).

Usage: python -m benchmarks.cost_model.host_time      (writes benchmarks/cost_model/host_time.json)
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.options.blocks import compiled_blocks
from benchmarks.records import origin, prepare, write
from lightning_unified.cost_model.rates import measure_rates
from lightning_unified.nn.recomputing import Recomputing
from lightning_unified.options.compilation import Compilation

COMMAND = "python -m benchmarks.cost_model.host_time"
RESULTS = Path(__file__).with_suffix(".json")
BLOCKS, ROWS, LENGTH, WIDTH = 12, 4, 64, 256
ROUNDS, STEPS = 5, 10


class Network(nn.Module):
    """Repeated transformer blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(compiled_blocks.Block() for _ in range(BLOCKS))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def seconds(network: nn.Module, *, entries: Tensor) -> dict[str, float]:
    """Return the seconds of a block's forward pass, and of forward and backward pass."""

    def step() -> float:
        begun = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = network(entries.clone().requires_grad_()).sum()
        forward = time.perf_counter() - begun
        loss.backward()
        return forward

    for _ in range(6):
        step()
    torch.cuda.synchronize()
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        forward = sum(step() for _ in range(STEPS))
        torch.cuda.synchronize()
        whole = time.perf_counter() - begun
        if not best or whole < best["both"]:
            best = {"forward": forward, "both": whole}
    return {name: value / STEPS / BLOCKS for name, value in best.items()}


def kernels(call: Callable[[], Any]) -> int:
    """Return the number of kernels that a call launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
    return sum(event.count for event in profiled.key_averages() if event.key in launches)


def main() -> None:
    prepare("host-time")
    torch.set_float32_matmul_precision("high")
    compiled_blocks.WIDTH, compiled_blocks.HEADS = WIDTH, 4
    network = Network().cuda()
    entries = torch.randn(ROWS, LENGTH, WIDTH, device="cuda")
    launch = measure_rates("cuda").launch
    found: dict[str, dict[str, float]] = {"eager": seconds(network, entries=entries)}
    with Recomputing(network.blocks):
        found["eager, recomputed"] = seconds(network, entries=entries)
    compilation = Compilation("blocks")
    compilation.begin(network)
    found["compiled"] = seconds(network, entries=entries)

    def once() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            network(entries.clone().requires_grad_()).sum().backward()

    launched = kernels(once) / BLOCKS
    with Recomputing(network.blocks):
        found["compiled, recomputed"] = seconds(network, entries=entries)
    compilation.end()
    again = {
        kind: (found[f"{kind}, recomputed"]["both"] - found[kind]["both"] - found[kind]["forward"]) / launch
        for kind in ("eager", "compiled")
    }
    results = {
        **origin(COMMAND),
        "device": torch.cuda.get_device_name(),
        "launch_us": launch * 1e6,
        "block_us": {kind: {name: value * 1e6 for name, value in each.items()} for kind, each in found.items()},
        "kernels_of_a_compiled_block": launched,
        "launches_of_a_compiled_call": (found["compiled"]["both"] / launch - launched) / 2,
        "launches_of_a_recomputed_block": again,
    }
    write(results, RESULTS)
    print(results)


if __name__ == "__main__":
    main()
