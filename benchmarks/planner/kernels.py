"""Note the memory that cuDNN's recurrences and convolutions take inside, over many shapes.

    python -m benchmarks.planner.kernels --output FILE [--seconds 60]

Each line of the output is the JSON of one call: its sizes, and the signed bytes of every allocation of its forward and backward
pass, in order. Formulas in `cost_model/backends` are fitted to such lines.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

_LEAST = 4096  # bytes of an allocation that is noted
_MOST = 2**31  # entries of a call's operands
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _noted(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return what `run` returns, and the signed bytes of its allocations."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)
    result = run()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    return result, [
        signs[one["action"]] * one["size"] for one in entries if one["action"] in signs and one["size"] >= _LEAST
    ]


def _recurrences() -> Iterator[dict[str, Any]]:
    """Yield the settings of recurrent layers."""
    shapes = (
        (160, 257, 512, 512),
        (64, 100, 512, 512),
        (32, 64, 256, 128),
        (128, 33, 1024, 512),
        (16, 512, 96, 96),
        (8, 50, 64, 32),
    )
    for cell, layers, both, (rows, steps, width, inputs) in itertools.product(
        ("LSTM", "GRU", "RNN"), (1, 2, 3), (False, True), shapes
    ):
        for dtype in ("float32", "float16"):
            yield {
                "cell": cell,
                "layers": layers,
                "both": both,
                "rows": rows,
                "steps": steps,
                "width": width,
                "inputs": inputs,
                "dtype": dtype,
            }
    for cell, layers, extra in itertools.product(
        ("LSTM", "GRU"), (1, 2), ({"packed": True}, {"dropout": 0.1}, {"first": True}, {"projects": 64}, {"eval": True})
    ):
        if cell == "LSTM" or "projects" not in extra:
            for both, dtype in itertools.product((False, True), ("float32", "float16")):
                yield {
                    "cell": cell,
                    "layers": layers,
                    "both": both,
                    "rows": 64,
                    "steps": 100,
                    "width": 512,
                    "inputs": 256,
                    "dtype": dtype,
                    **extra,
                }


def _recurrence(one: dict[str, Any]) -> dict[str, list[int]]:
    options: dict[str, Any] = {"proj_size": one["projects"]} if "projects" in one else {}
    layer = getattr(nn, one["cell"])(
        one["inputs"], one["width"], one["layers"], bidirectional=one["both"], dropout=one.get("dropout", 0.0),
        batch_first=one.get("first", False), **options,
    ).to("cuda", _DTYPES[one["dtype"]])  # fmt: skip
    shape = (one["rows"], one["steps"]) if one.get("first") else (one["steps"], one["rows"])
    source: Any = torch.randn(*shape, one["inputs"], device="cuda", dtype=_DTYPES[one["dtype"]], requires_grad=True)
    given = source
    if one.get("packed"):
        lengths = torch.linspace(one["steps"] // 2, one["steps"], one["rows"]).long().flip(0)
        given = pack_padded_sequence(source, lengths)
    layer.train(not one.get("eval"))
    with torch.set_grad_enabled(not one.get("eval")):
        out, forward = _noted(lambda: layer(given))
    out = out[0].data if one.get("packed") else out[0]
    if one.get("eval"):
        return {"forward": forward}
    gradient = torch.ones_like(out)
    return {"forward": forward, "backward": _noted(lambda: out.backward(gradient))[1]}


def _convolutions(chosen: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the settings of convolutions, without end."""
    while True:
        dims = chosen.choice((1, 2, 2, 2, 3, 3))
        points = chosen.choice((1, 2, 3, 3, 3, 4, 5, 7))
        into, out = (chosen.choice((1, 3, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)) for _ in range(2))
        groups = chosen.choice((1, 1, 1, into, 4))
        if groups > 1:
            out = into if groups == into else out
            if into % groups or out % groups:
                continue
        dilation = chosen.choice((1, 1, 1, 2, 6))
        yield {
            "dims": dims, "points": points, "into": into, "out": out, "groups": groups, "dilation": dilation,
            "stride": 1 if dilation > 1 else chosen.choice((1, 1, 2)), "transposed": chosen.random() < 0.15,
            "rows": chosen.choice((4, 8, 16, 40)), "side": chosen.choice({1: (257, 1024, 4096), 2: (28, 56, 64, 128, 224), 3: (8, 16, 28, 56)}[dims]),
            "dtype": chosen.choice(("float32", "bfloat16")), "last": chosen.random() < 0.1, "bias": chosen.random() < 0.5,
        }  # fmt: skip


def _convolution(one: dict[str, Any]) -> dict[str, list[int]] | None:
    reach = one["dilation"] * (one["points"] - 1)
    size = one["rows"] * one["side"] ** one["dims"]
    if (
        size * max(one["into"], one["out"]) > _MOST // 16
        or size * min(one["into"], one["out"]) < 2**17
        or reach >= one["side"]
    ):
        return None
    name = f"Conv{'Transpose' * one['transposed']}{one['dims']}d"
    layer = getattr(nn, name)(
        one["into"], one["out"], one["points"], stride=one["stride"], padding=reach // 2, dilation=one["dilation"],
        groups=one["groups"], bias=one["bias"],
    ).to("cuda", _DTYPES[one["dtype"]])  # fmt: skip
    source = torch.randn(
        one["rows"], one["into"], *[one["side"]] * one["dims"], device="cuda", dtype=_DTYPES[one["dtype"]]
    )
    if one["last"] and one["dims"] > 1:
        layout: Any = torch.channels_last if one["dims"] == 2 else torch.channels_last_3d
        source, layer = source.contiguous(memory_format=layout), layer.to(memory_format=layout)
    source.requires_grad_()
    out, forward = _noted(lambda: layer(source))
    gradient = torch.ones_like(out)
    found = {"forward": forward}
    leaves: dict[str, Tensor] = {"source": source, "weight": layer.weight}
    for which, leaf in leaves.items():
        found[which] = _noted(lambda leaf=leaf: torch.autograd.grad(out, leaf, gradient, retain_graph=True))[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of convolutions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    with options.output.open("w", encoding="utf-8") as file:
        kinds = (
            ("recurrence", _recurrences(), _recurrence, 60.0),
            ("convolution", _convolutions(random.Random(options.seed)), _convolution, options.seconds),
        )
        for kind, settings, measure, seconds in kinds:
            begun, count = time.monotonic(), 0
            for one in settings:
                if time.monotonic() - begun > seconds:
                    break
                try:
                    found = measure(one)
                except (RuntimeError, ValueError) as error:
                    found = {"error": f"{type(error).__name__}: {error}"[:200]}
                if found is not None:
                    count += 1
                    file.write(json.dumps({"kind": kind, **one, **found}) + "\n")
                    file.flush()
            print(f"{kind}: {count} calls", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
