"""Host time of compiled and of recomputed blocks, in launches of one operation.

Twelve narrow transformer blocks run forward and backward on a GPU, with so little arithmetic that the host is the slower side. The unit is
the host's time of one eager operation on the same machine (`measure_rates`).

Usage: python -m benchmarks.cost_model.host_time      (writes benchmarks/cost_model/host_time.json)
"""

import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.options.blocks import compiled_blocks
from benchmarks.records import origin, prepare, write
from lightning_unified.cost_model.rates import measure_rates
from lightning_unified.cost_model.trace.trace import Work
from lightning_unified.nn.recomputing import Recomputing
from lightning_unified.options.compilation import Compilation
from lightning_unified.planner.dry_run import DryRun, StepSpec

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


class Step(L.LightningModule):
    """A training step of the blocks, for a dry run."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch.clone().requires_grad_()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def traced_operations(network: nn.Module) -> float:
    """Return the operations of a block, forward and backward, in the trace of a plan."""
    spec = StepSpec(
        module=Step(network).cpu(), batch=torch.zeros(ROWS, LENGTH, WIDTH), backend="cuda", precision="bf16-mixed"
    )
    events = DryRun(spec).run(ROWS).events
    found = [one for one in events if isinstance(one, Work) and "blocks" in one.place and one.op != "compiled call"]
    return len(found) / BLOCKS


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
    with Recomputing(network.blocks):
        found["compiled, recomputed"] = seconds(network, entries=entries)
    operations = traced_operations(network)
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
        "traced_operations_of_a_compiled_block": operations,
        "launches_of_a_compiled_call": (found["compiled"]["both"] / launch - operations) / 2,
        "launches_of_a_recomputed_block": again,
    }
    write(results, RESULTS)
    print(results)


if __name__ == "__main__":
    main()
