"""Time and memory of a chunked loss on a GPU, in a model with a large vocabulary.

The model and batch are those of `large_vocabulary.py` in bfloat16 autocast, trained by AdamW (fused), for several chunks. The batch runs
whole. `predicted MiB` is the peak of a dry run of the same step.

Usage: python -m benchmarks.options.loss.large_vocabulary_gpu [--steps 10]
       (writes benchmarks/options/loss/large_vocabulary_gpu.json; two to three minutes on an H200)
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.options.loss.large_vocabulary import ROWS, VOCABULARY, CausalLM
from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import predict
from lightning_unified.nn.lazy_logits import LazyHeads

RESULTS = Path(__file__).with_suffix(".json")
CHUNKS = (None, 8192, 1024, 128)
LENGTH = 1024


def measured(*, lora: bool, chunk: int | None, steps: int, warmup: int = 3) -> dict[str, Any]:
    """Return milliseconds of a step and the peak in MiB."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = CausalLM(lora=lora).train()
    heads = None if chunk is None else LazyHeads(module, chunk)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-4, fused=True)
    batch = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device="cuda")
    losses = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    if heads is not None:
        heads.remove()
    return {
        "ms/step": round(1000 * seconds, 1),
        "peak MiB": round(torch.cuda.max_memory_allocated() / 2**20),
        "loss": [round(float(loss), 4) for loss in losses[:4]],
    }


def predicted(*, lora: bool, chunk: int | None) -> dict[str, Any]:
    """Return the predicted peak in MiB of the same step."""
    with torch.device("meta"):
        module = CausalLM(lora=lora)
    batch = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    kernel = "fused"
    found = predict(module, batch, device="cuda", precision="bf16-mixed", loss_chunk=chunk, optimizer_kernel=kernel)
    return {"predicted MiB": round(found.peak_bytes / 2**20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("large-vocabulary-gpu")
    record = origin("python -m benchmarks.options.loss.large_vocabulary_gpu")
    record |= {
        "accelerator": torch.cuda.get_device_name(),
        "precision": "bf16 autocast",
        "rows": ROWS,
        "length": LENGTH,
    }
    runs: list[dict[str, Any]] = []
    for lora in (True, False):
        for chunk in CHUNKS:
            run: dict[str, Any] = {"trained": "LoRA, rank 16" if lora else "all weights", "chunk": chunk}
            try:
                run |= measured(lora=lora, chunk=chunk, steps=arguments.steps)
            except torch.OutOfMemoryError as error:
                run |= {"failed": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
            runs.append(run)
            print(run, flush=True)
            write(record | {"runs": runs}, arguments.output)
    for run in runs:
        run.update(predicted(lora=run["trained"].startswith("LoRA"), chunk=run["chunk"]))
        print(run, flush=True)
        write(record | {"runs": runs}, arguments.output)
    columns = ("ms/step", "peak MiB", "predicted MiB")
    named = {f"{run['trained']}, {run['chunk'] or 'all logits'}": run for run in runs}
    print(markdown({name: {key: run.get(key) for key in columns} for name, run in named.items()}, first="step"))


if __name__ == "__main__":
    main()
