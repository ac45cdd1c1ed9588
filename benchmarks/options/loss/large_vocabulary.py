"""Plans of a Hugging Face model with a large vocabulary, with and without a chunked loss.

The model has the shape of Qwen2.5-0.5B (24 layers, 151,936 tokens); its weights lie on the meta device. A plan trains it in a batch of 8
rows of 2,048 and of 1,024 tokens on the simulated machine m2-16gb, with LoRA and with all weights. For each, one plan may use
`loss_chunk` and the other may not. `least` is the smallest step in two ways to compute the loss: 1 row at a time, all blocks recomputed.
Entries that the record holds already are kept; delete the file to make them anew.

Usage: python -m benchmarks.options.loss.large_vocabulary [--lengths 2048 1024]
       (writes benchmarks/options/loss/large_vocabulary.json; a quarter of an hour on one idle core)
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import Plan, plan, predict
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.hardware import resolve_budget
from lightning_unified.hardware.simulated import SimulatedMachine

RESULTS = Path(__file__).with_suffix(".json")
MACHINE, ROWS, VOCABULARY = "m2-16gb", 8, 151_936
NAMES = {True: "LoRA, rank 16", False: "all weights"}


class CausalLM(L.LightningModule):
    """A user's module around a Hugging Face model; it knows nothing of chunks."""

    def __init__(self, *, lora: bool) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, Qwen2Config

        shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        config = Qwen2Config(
            vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False, **shape
        )
        model = AutoModelForCausalLM.from_config(config)
        self.network = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")) if lora else model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-4)


def plan_on_machine(*, lora: bool, length: int, budget: int, **options: Any) -> Plan:
    """Return the plan of `CausalLM` on the simulated machine, with `options` of `plan`."""
    with torch.device("meta"):
        module = CausalLM(lora=lora)
    return plan(
        module,
        torch.zeros(ROWS, length, dtype=torch.long),
        budget=budget,
        device="mps",
        precision="bf16-mixed",
        rates=tabled_rates(MACHINE),
        **options,
    )


def figures(found: Plan) -> dict[str, Any]:
    """Return a plan's reserved GiB (2**30 bytes), seconds a step, and reason of its size."""
    prediction = found.prediction
    return {
        "GiB": None if prediction is None else round(prediction.reserved_bytes / 2**30, 2),
        "seconds": None if prediction is None or prediction.seconds is None else round(prediction.seconds, 2),
        "reason": found.reasons["micro_batch_size"],
    }


def planned(*, lora: bool, chunks: bool, length: int, budget: int) -> dict[str, Any]:
    """Return a plan as plain values."""
    found = plan_on_machine(lora=lora, length=length, budget=budget, loss_chunk="auto" if chunks else False)
    return {
        "trained": NAMES[lora],
        "length": length,
        "loss_chunk": "auto" if chunks else "false",
        "micro_batch_size": found.micro_batch_size,
        "checkpointing": found.recomputed,
        "chunk": found.loss_chunk,
        **figures(found),
    }


def least(*, lora: bool, chunk: int | None, length: int) -> dict[str, Any]:
    """Return the predicted memory of the smallest step."""
    with torch.device("meta"):
        module = CausalLM(lora=lora)
    batch = torch.zeros(ROWS, length, dtype=torch.long)
    found = predict(
        module, batch, device="mps", precision="bf16-mixed", micro_batch_size=1, recompute=True, loss_chunk=chunk
    )
    live, reserved = (round(count / 2**30, 2) for count in (found.peak_bytes, found.reserved_bytes))
    return {"trained": NAMES[lora], "length": length, "chunk": chunk, "live GiB": live, "reserved GiB": reserved}


def missing(made: list[dict[str, Any]], **wanted: Any) -> bool:
    """Return whether no entry of the record has these values."""
    return not any(all(one[name] == value for name, value in wanted.items()) for one in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 1024])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("large-vocabulary")
    budget = resolve_budget("auto", SimulatedMachine(MACHINE).reading()).bytes
    record = origin("python -m benchmarks.options.loss.large_vocabulary")
    record |= {"simulated": MACHINE, "budget_bytes": budget, "rows": ROWS, "least": [], "runs": []}
    if arguments.output.exists():
        known = json.loads(arguments.output.read_text(encoding="utf-8"))
        record |= {name: known.get(name, []) for name in ("least", "runs")}
    for length, lora, chunk in itertools.product(arguments.lengths, (True, False), (None, 128)):
        if missing(record["least"], length=length, trained=NAMES[lora], chunk=chunk):
            record["least"].append(least(lora=lora, chunk=chunk, length=length))
            print(record["least"][-1], flush=True)
            write(record, arguments.output)
    for length, lora, chunks in itertools.product(arguments.lengths, (True, False), (False, True)):
        if missing(record["runs"], length=length, trained=NAMES[lora], loss_chunk="auto" if chunks else "false"):
            record["runs"].append(planned(lora=lora, chunks=chunks, length=length, budget=budget))
            print(record["runs"][-1], flush=True)
            write(record, arguments.output)
    columns = ("micro_batch_size", "checkpointing", "chunk", "GiB", "seconds")
    rows = {
        f"{run['length']} tokens, {run['trained']}, loss_chunk: {run['loss_chunk']}": {key: run[key] for key in columns}
        for run in record["runs"]
    }
    print(markdown(rows, first="trained"))


if __name__ == "__main__":
    main()
