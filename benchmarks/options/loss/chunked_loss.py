"""Time and memory of the chunked loss on a GPU: torch's operators, fused, all logits.

One forward and backward pass of a mean loss in bfloat16 autocast, for three vocabularies and several chunk sizes. Peaks are those of the
caching allocator, above the operands.

Usage: python -m benchmarks.options.loss.chunked_loss [--repeats 20]
       (writes benchmarks/options/loss/chunked_loss.json; under a minute on an H200)
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified.nn.cross_entropy import kernels
from lightning_unified.nn.linear_cross_entropy import chunk_rows_for, linear_cross_entropy

RESULTS = Path(__file__).with_suffix(".json")
SHAPES = [(32_768, 768, 50_304), (8_192, 896, 151_936), (16_384, 512, 32_000)]  # rows, width, classes
CHUNKS = (512, 1024, 2048, 4096, 8192)


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def chunked(rows: int | None, *, fused: bool) -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with nullcontext() if fused else mock.patch.object(kernels, "fused_on", return_value=False):
            return linear_cross_entropy(hidden, weight=weight, labels=labels, chunk_rows=rows)

    return loss


def measured(loss: Callable[..., Tensor], rows: int, width: int, classes: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds and the peak in MiB of one forward and backward pass."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(classes, width, device="cuda") * 0.02)
    labels = torch.randint(0, classes, (rows,), device="cuda")

    def step() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(hidden, weight, labels)
        value.backward()

    for _ in range(3):
        step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / repeats
    return {
        "milliseconds": round(1000 * seconds, 2),
        "peak MiB": round((torch.cuda.max_memory_allocated() - before) / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("chunked-loss")
    runs: list[dict[str, Any]] = []
    for rows, width, classes in SHAPES:
        own = chunk_rows_for(classes, rows=rows)
        ways = {
            "all logits": whole,
            f"torch's operators, {own} rows": chunked(own, fused=False),
            **{f"fused, {chunk} rows": chunked(chunk, fused=True) for chunk in CHUNKS},
            "fused, gradients in the forward pass": chunked(None, fused=True),
        }
        for way, loss in ways.items():
            shape = {"rows": rows, "width": width, "classes": classes, "way": way}
            runs.append(shape | measured(loss, rows, width, classes, arguments.repeats))
            print(runs[-1], flush=True)
    record = origin("python -m benchmarks.options.loss.chunked_loss")
    record |= {"accelerator": torch.cuda.get_device_name(), "precision": "bf16 autocast", "runs": runs}
    write(record, arguments.output)
    named = {f"{run['classes']:,} classes: {run['way']}": run for run in runs}
    columns = ("rows", "width", "milliseconds", "peak MiB")
    print(markdown({name: {key: run[key] for key in columns} for name, run in named.items()}, first="loss"))


if __name__ == "__main__":
    main()
