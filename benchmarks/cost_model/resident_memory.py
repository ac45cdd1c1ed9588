"""Compare a process's growth on a CPU with the heap model's estimate.

Both see the same allocations.

    OMP_NUM_THREADS=1 python -m benchmarks.cost_model.resident_memory [--output benchmarks/cost_model/resident_memory.json]

For each network three fresh processes: two train a few steps and read the highest resident memory (`VmHWM`, reset after a tiny
network of the same kind has loaded the libraries), with the C library as it is and with `M_MMAP_THRESHOLD` of 64 KiB; the third
records every allocation and its end with torch's profiler. The record goes through `HostHeap`. The model's one fitted figure
was fitted on the cases that are not marked `held out`. Linux with glibc only; five minutes on two cores.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lightning_unified.hardware.allocators.host_heap import HostHeap

STEPS = 3
THRESHOLD = 64 * 2**10


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self, width):
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Language(nn.Module):
    """A small causal transformer, with logits."""

    def __init__(self, width, layers, vocabulary=8192):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.embedding(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def convolutions(width):
    layers, channels = [], 3
    for depth in range(4):
        out = width * 2**depth
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def perceptron(width):
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def tokens(rows, length):
    return lambda: (torch.randint(0, 8192, (rows, length)), torch.randint(0, 8192, (rows, length)))


def floats(*shape):
    return lambda: (torch.randn(shape), torch.randint(0, 10, shape[:1]))


CASES = {
    "mlp 2048, 512 rows": (lambda: perceptron(2048), floats(512, 256)),
    "mlp 1024, 8192 rows": (lambda: perceptron(1024), floats(8192, 256)),
    "cnn 32, 64 rows": (lambda: convolutions(32), floats(64, 3, 64, 64)),
    "cnn 64, 32 rows": (lambda: convolutions(64), floats(32, 3, 96, 96)),
    "lstm 256, 64 x 64": (lambda: Recurrent(256), floats(64, 64, 256)),
    "lm 256 x 4, 4 x 128": (lambda: Language(256, 4), tokens(4, 128)),
    "lm 256 x 4, 16 x 128": (lambda: Language(256, 4), tokens(16, 128)),
    "lm 384 x 6, 8 x 256": (lambda: Language(384, 6), tokens(8, 256)),
    "mlp 1536, 2048 rows": (lambda: perceptron(1536), floats(2048, 256)),
    "cnn 48, 48 rows": (lambda: convolutions(48), floats(48, 3, 80, 80)),
    "lm 320 x 5, 12 x 160": (lambda: Language(320, 5), tokens(12, 160)),
    "lm 512 x 3, 6 x 96": (lambda: Language(512, 3), tokens(6, 96)),
}
HELD_OUT = 4
TINY = {
    "mlp": (lambda: perceptron(16), floats(4, 256)),
    "cnn": (lambda: convolutions(4), floats(4, 3, 32, 32)),
    "lstm": (lambda: Recurrent(16), floats(4, 4, 16)),
    "lm": (lambda: Language(16, 1), tokens(2, 8)),
}


def train(build, batch, *, steps):
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(steps):
        x, y = batch()
        out = module(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del out, loss, x, y


def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(name):
    """Return by how many bytes this process grew while it trained."""
    train(*TINY[name.split()[0]], steps=2)
    gc.collect()
    before = status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    highest = status("VmHWM")
    train(*CASES[name], steps=STEPS)
    return {"grown": status("VmHWM") - before, "reset": highest - before}


def record(name):
    """Return every allocation and release, in order.

    A positive number is the size in bytes of a new storage. A release is minus the storage's number, less one.
    """
    train(*TINY[name.split()[0]], steps=2)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(*CASES[name], steps=STEPS)
    found, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, len(found), event.extra_fields.ptr, event.extra_fields.alloc_size))
    events, live, count = [], {}, 0
    for _, _, address, size in sorted(found):
        if size > 0:
            live[address] = count
            count += 1
            events.append(size)
        elif address in live:
            events.append(-live.pop(address) - 1)
    return events


def replayed(events, threshold):
    """Return the most that lives and the most that is resident, by the model."""
    heap, blocks, sizes, live, most, resident = HostHeap(threshold=threshold), [], [], 0, 0, 0
    for event in events:
        if event > 0:
            size = heap.rounded(event)
            blocks.append(heap.reuse(size) or heap.place(size, pressed=False))
            sizes.append(event)
            live += event
        else:
            live -= sizes[-event - 1]
            heap.give_back(blocks[-event - 1])
        most, resident = max(most, live), max(resident, heap.reserved)
    return most, resident


def fresh(what, name, threshold=None):
    command = [sys.executable, "-m", "benchmarks.cost_model.resident_memory", "--child", what, name]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": str(threshold)} if threshold else {})}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", nargs=2)
    arguments = parser.parse_args()
    if arguments.child:
        what, name = arguments.child
        torch.manual_seed(0)
        print(json.dumps({"measure": measure, "record": record}[what](name)))
        return
    rows = []
    for at, name in enumerate(CASES):
        events = fresh("record", name)
        row = {"case": name, "held_out": at >= len(CASES) - HELD_OUT, "live": replayed(events, None)[0]}
        for kind, threshold in (("default", None), ("threshold", THRESHOLD)):
            resident, grown = replayed(events, threshold)[1], fresh("measure", name, threshold)["grown"]
            row[kind] = {"model": resident, "real": grown, "error": resident / grown - 1}
        rows.append(row)
        print(
            f"{name:22} live {row['live'] / 2**20:6.1f} MiB"
            + "".join(
                f"   {kind}: model {row[kind]['model'] / 2**20:6.1f} real {row[kind]['real'] / 2**20:6.1f} ({row[kind]['error']:+.1%})"
                for kind in ("default", "threshold")
            ),
            flush=True,
        )
    versions = {"torch": torch.__version__, "libc": " ".join(platform.libc_ver()), "threads": torch.get_num_threads()}
    arguments.output.write_text(json.dumps({"versions": versions, "steps": STEPS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
