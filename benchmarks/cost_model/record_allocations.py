"""Record the requests of training runs to CUDA's caching allocator.

The model of the allocator and the predictions are tested against the records.

    python -m benchmarks.cost_model.record_allocations [--output tests/cost_model/memory/recorded] [--only gpt]

On a CUDA machine, some minutes. Each run is a fresh process with segments of fixed size, which the model is of: small ones, and
cells of `planner/accuracy.py` (a whole fit each).
A file holds sizes and order only: a number of bytes begins a block, minus the block's number less one ends it, in the order in
which the allocator got to know; beside them torch's own two peaks, how many blocks there were before anything was computed, where that is
known, and, for whoever looks for a difference, the segments.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

OUTPUT = Path(__file__).parents[2] / "tests" / "cost_model" / "memory" / "recorded"
STEPS = 3
SEGMENTS = ("segment_alloc", "segment_map", "segment_free", "segment_unmap")


class Attention(nn.Module):
    """A block as in GPT-2."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (part.view(B, T, -1, 64).transpose(1, 2) for part in self.qkv(self.first(x)).split(D, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.second(x))


class Language(nn.Module):
    """A small GPT."""

    def __init__(self, *, width=512, layers=8, vocabulary=16_384):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Attention(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self, width=512):
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, num_layers=2, batch_first=True), nn.Linear(width, 100)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def perceptron():
    return nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 100))


def convolutions():
    layers, channels = [], 3
    for out in (48, 96, 192, 384):
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


def tokens(rows, length):
    return lambda: (torch.randint(0, 16_384, (rows, length)), torch.randint(0, 16_384, (rows, length)))


def floats(*shape):
    return lambda: (torch.randn(shape), torch.randint(0, 100, shape[:1]))


RUNS = {
    "mlp": (perceptron, floats(2048, 512), False, {}),
    "cnn": (convolutions, floats(32, 3, 128, 128), False, {}),
    "gpt": (Language, tokens(4, 512), True, {"fused": True}),
    "gpt_foreach": (Language, tokens(3, 384), True, {"foreach": True}),
    "lstm": (Recurrent, floats(64, 100, 512), False, {}),
}

CELLS = {
    "cnn_fit": "cuda | cnn | bf16-mixed | kept | adamw fused | 64 rows",
    "graph_fit": "cuda | graph scatter | 16-mixed | kept | adamw foreach | 4 rows",
    "resnet_fit": "cuda | resnet | 32-true | kept | sgd momentum | 120 rows",
    "moe_fit": "cuda | moe, fixed capacity | 32-true | recomputed | adamw foreach | 20 rows",
    "unet_fit": "cuda | u-net | bf16-mixed | recomputed | adamw fused | 20 rows",
}


def fit(name):
    """Train a cell as `planner/accuracy.py` does.

    The number of blocks is unknown before the first computation.
    """
    from benchmarks.planner.harness.cells import select
    from benchmarks.planner.harness.truth import _trained

    _trained(next(cell for cell in select("cuda") if cell.key == CELLS[name]))
    torch.cuda.synchronize()
    return {"cell": CELLS[name]}


def train(name):
    """Train one of the small runs."""
    build, batch, autocast, kernel = RUNS[name]
    module = build().to("cuda")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **kernel)
    weights = None
    for _ in range(STEPS):
        x, y = (part.to("cuda") for part in batch())
        weights = weights or sum(entry["action"] == "alloc" for entry in recorded())
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(module(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return {"weights": weights}


def recorded():
    return torch.cuda.memory._snapshot()["device_traces"][0]


def compact(entries):
    """Return events as numbers, and the sizes of the segments that began or ended.

    A block is taken to end where its end was completed; on one stream that is where it was asked for.
    """
    events, segments, numbers, waiting, count, streams = [], [], {}, 0, 0, set()
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            numbers[address] = count
            count += 1
            events.append(size)
            streams.add(entry.get("stream", 0))
        elif action == "free_requested":
            waiting += 1
        elif action == "free_completed":
            waiting -= 1
            events.append(-numbers.pop(address) - 1)
        elif action in SEGMENTS:
            segments.append(size if action in SEGMENTS[:2] else -size)
    return {"events": events, "segments": segments, "unfinished_frees": waiting, "streams": len(streams)}


def record(name, path):
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    about = fit(name) if name in CELLS else train(name)
    found = {
        "name": name,
        **about,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        **compact(recorded()),
    }
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps(found, separators=(",", ":")).encode())
    print(
        f"{path.name:36} {len(found['events']):6} events {path.stat().st_size:7} bytes  "
        f"allocated {found['max_memory_allocated'] / 2**20:8.1f}  reserved {found['max_memory_reserved'] / 2**20:8.1f} MiB"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", choices=sorted({**RUNS, **CELLS}))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        record(arguments.only, arguments.child)
        return
    if not torch.cuda.is_available():
        sys.exit(
            "record_allocations.py records CUDA's allocator and there is no CUDA device here; run it on a machine with one."
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else [*RUNS, *CELLS]:
        path = arguments.output / f"{name}.json.gz"
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.cost_model.record_allocations",
            "--only",
            name,
            "--child",
            str(path),
        ]
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
