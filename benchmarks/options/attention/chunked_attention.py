"""Steps and plans of a language model on a simulated Mac, with and without chunks.

`steps` and `plans` have the shape of Qwen2.5-0.5B (24 layers, 14 heads) with LoRA and weights on the meta device, in rows of 2,048 tokens on
the simulated machine m2-16gb in bf16-mixed. `steps` predicts a step of 1 row; `plans` is the choice for a batch of 8 rows. `runs` trains a small
model of the same kind on the simulated machine, and compares the predicted peak with the counted one. Nothing runs on a Mac.
Entries that the record holds already are kept; delete the file to make them anew.

Usage: python -m benchmarks.options.attention.chunked_attention
       (writes benchmarks/options/attention/chunked_attention.json; ten minutes on one idle core)
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.options.loss.large_vocabulary import MACHINE, ROWS, CausalLM, figures, missing, plan_on_machine
from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import Plan, UnifiedStrategy, predict
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.hardware import resolve_budget
from lightning_unified.hardware.simulated import SimulatedMachine

RESULTS = Path(__file__).with_suffix(".json")
LENGTH, CHUNK = 2048, 128  # tokens of a row; rows of logits in a chunk of the loss
SMALL_LENGTH, SMALL_ROWS, SMALL_BUDGET = 1024, 1, "1536MiB"
SMALL_STEPS = 3  # a prediction replays a first step and two more


def step(*, recompute: bool, attention: str) -> dict[str, Any]:
    """Return the predicted memory and time of a step of one row."""
    with torch.device("meta"):
        module = CausalLM(lora=True)
    found = predict(
        module,
        torch.zeros(1, LENGTH, dtype=torch.long),
        device="mps",
        precision="bf16-mixed",
        recompute=recompute,
        loss_chunk=CHUNK,
        attention="chunked" if attention == "chunked" else None,
        rates=tabled_rates(MACHINE),
    )
    live, reserved = (round(count / 2**30, 2) for count in (found.peak_bytes, found.reserved_bytes))
    seconds = None if found.seconds is None else round(found.seconds, 2)
    return {
        "recompute": recompute,
        "attention": attention,
        "live GiB": live,
        "reserved GiB": reserved,
        "seconds": seconds,
        "peak in": found.instant,
    }


def planned(*, attention: str, budget: int) -> dict[str, Any]:
    """Return a plan as plain values."""
    found = plan_on_machine(lora=True, length=LENGTH, budget=budget, attention=attention)
    return {
        "asked": attention,
        "micro_batch_size": found.micro_batch_size,
        "checkpointing": found.recomputed,
        "loss chunk": found.loss_chunk,
        "attention": found.attention or "torch",
        **figures(found),
    }


class Small(CausalLM):
    """The same kind of model, small enough for a CPU; it keeps the plan of its last step."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import AutoModelForCausalLM, Qwen2Config

        torch.manual_seed(0)
        shape: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        config = Qwen2Config(vocab_size=2000, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False, **shape)
        self.network = AutoModelForCausalLM.from_config(config)
        self.plan: Plan | None = None

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.plan = getattr(self.trainer.strategy, "plan", None)


def run(*, attention: str) -> dict[str, Any]:
    """Return the predicted and the counted peak of a simulated run."""
    module, strategy = Small(), UnifiedStrategy(simulate=MACHINE, budget=SMALL_BUDGET, attention=attention)  # pyright: ignore[reportArgumentType]
    trainer = L.Trainer(
        max_steps=SMALL_STEPS,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randint(0, 2000, (SMALL_STEPS * SMALL_ROWS, SMALL_LENGTH)), SMALL_ROWS))  # pyright: ignore[reportArgumentType]
    found, machine = module.plan, strategy.simulated
    assert found is not None
    assert found.prediction is not None
    assert machine is not None
    predicted, counted = found.prediction.peak_bytes, machine.allocator.peak
    sizes = {"predicted MiB": round(predicted / 2**20, 2), "counted MiB": round(counted / 2**20, 2)}
    return {"attention": attention, "micro_batch_size": found.micro_batch_size, **sizes, "ratio": predicted / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("chunked-attention")
    budget = resolve_budget("auto", SimulatedMachine(MACHINE).reading()).bytes
    record = origin("python -m benchmarks.options.attention.chunked_attention")
    record |= {"simulated": MACHINE, "budget_bytes": budget, "length": LENGTH, "rows": ROWS}
    record |= {"steps": [], "plans": [], "runs": []}
    if arguments.output.exists():
        known = json.loads(arguments.output.read_text(encoding="utf-8"))
        record |= {name: known.get(name, []) for name in ("steps", "plans", "runs")}

    def keep(kind: str, entry: dict[str, Any]) -> None:
        record[kind].append(entry)
        print(entry, flush=True)
        write(record, arguments.output)

    kinds = ("torch", "chunked")
    for attention in kinds:
        if missing(record["runs"], attention=attention):
            keep("runs", run(attention=attention))
    for recompute, attention in itertools.product((False, True), kinds):
        if missing(record["steps"], recompute=recompute, attention=attention):
            keep("steps", step(recompute=recompute, attention=attention))
    for attention in ("torch", "auto"):
        if missing(record["plans"], asked=attention):
            keep("plans", planned(attention=attention, budget=budget))
    for kind in ("runs", "steps", "plans"):
        rows = {
            str(at): {name: value for name, value in one.items() if name != "reason"}
            for at, one in enumerate(record[kind])
        }
        print(markdown(rows, first=kind))


if __name__ == "__main__":
    main()
