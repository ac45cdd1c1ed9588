"""Record the workspaces of cuDNN's convolutions from CUDA's caching allocator.

The formula for these workspaces is tested against the records.

    python -m benchmarks.cost_model.record_convolutions [--output tests/cost_model/backends/kernel_memory/cudnn_convolutions.json] [--shapes 120]

On a CUDA machine, a minute. A row holds a 2-D convolution (rows, channels read, channels written, entries a side, points a side, stride, dtype)
and the most bytes taken beside the results by its forward pass and by the passes for the gradients of its input and of its weight.
"""

import argparse
import json
import random
import sys
from itertools import product
from pathlib import Path

import torch

OUTPUT = Path(__file__).parents[2] / "tests" / "cost_model" / "backends" / "kernel_memory" / "cudnn_convolutions.json"
CHANNELS = ((3, 64), (32, 48), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (512, 512))
KERNELS = ((3, 1), (3, 2), (1, 1), (1, 2), (7, 2), (5, 1), (2, 2), (4, 2))
LARGEST = 64 * 64 * 128 * 128  # entries of an operand


def shapes():
    """Return the convolutions in an order that is always the same."""
    found = [
        (rows, into, out, side, kernel, stride)
        for rows, (into, out), side, (kernel, stride) in product(
            (4, 16, 64), CHANNELS, (16, 32, 56, 64, 112, 128, 256), KERNELS
        )
        if rows * max(into, out) * side**2 <= LARGEST
    ]
    random.Random(0).shuffle(found)
    return found


def taken(call):
    """Return the most bytes that were there beside what `call` returns, at any moment of it."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
    result = call()
    torch.cuda.synchronize()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    kept = {each.data_ptr() for each in (result if isinstance(result, tuple) else (result,)) if each is not None}
    most, sizes = 0, {}
    for entry in entries:
        if entry["action"] == "alloc" and entry["addr"] not in kept:
            sizes[entry["addr"]] = entry["size"]
            most = max(most, sum(sizes.values()))
        elif entry["action"] == "free_requested":
            sizes.pop(entry["addr"], None)
    return most


def measure(rows, into, out, side, kernel, stride, dtype):
    source = torch.randn(rows, into, side, side, device="cuda", dtype=dtype)
    weight = torch.randn(out, into, kernel, kernel, device="cuda", dtype=dtype)
    settings = ([stride] * 2, [kernel // 2 if kernel % 2 else 0] * 2, [1, 1], False, [0, 0], 1)
    gradient = torch.randn_like(torch.ops.aten.convolution(source, weight, None, *settings))
    passes = [lambda: torch.ops.aten.convolution(source, weight, None, *settings)]
    passes += [
        lambda mask=mask: torch.ops.aten.convolution_backward(gradient, source, weight, None, *settings, mask)
        for mask in ([True, False, False], [False, True, False])
    ]
    name = str(dtype).removeprefix("torch.")
    return [rows, into, out, side, kernel, stride, name, *[taken(each) for each in passes]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--shapes", type=int, default=120)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("record_convolutions.py records cuDNN's workspaces and there is no CUDA device here; run it on one.")
    chosen = shapes()[: arguments.shapes]
    rows = [measure(*shape, dtype) for shape in chosen for dtype in (torch.float32, torch.bfloat16)]
    arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in sorted(rows)) + "\n]\n")


if __name__ == "__main__":
    main()
