"""Plans of fine-tuning on a simulated Mac with 16 GB, of which 6 GiB are taken, and a run.

`plans` are plans of 16 rows with LoRA of rank 16, weights on the meta device, bf16-mixed. `runs` trains random weights of Qwen2.5-0.5B's shape
for three steps on the simulated machine, in the planned micro-batches of one row of 1,024 tokens, and compares the predicted peak with
the counted one. A step of the run has 2 rows instead of 16, for the CPU computes it: 2 micro-batches have the peak of 16. Nothing runs on a Mac.

Usage: python -m benchmarks.models.finetune.plans
       (writes benchmarks/models/finetune/plans.json; 5.5 GiB of memory, a quarter of an hour on two cores)
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified import Plan, UnifiedStrategy, plan
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.hardware import resolve_budget
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.models.finetune import Finetune

RESULTS = Path(__file__).with_suffix(".json")
MACHINE, BUDGET, ROWS, STEPS = "m2-16gb", "leave 6GiB", 16, 3
CASES = (("qwen2_5_0_5b", 1024), ("llama3_2_1b", 512))
RUN, RUN_ROWS = ("qwen2_5_0_5b", 1024), 2


def planned(preset: str, length: int, *, budget: int) -> dict[str, Any]:
    """Return the plan of a batch of `ROWS` rows as plain values."""
    with torch.device("meta"):
        module = Finetune(preset=preset, dtype="bfloat16")
    tokens = torch.zeros(ROWS, length, dtype=torch.long)
    found = plan(
        module,
        module.largest_batch({"tokens": tokens, "labels": tokens}),
        budget=budget,
        device="mps",
        precision="bf16-mixed",
        attention="auto",
        rates=tabled_rates(MACHINE),
    )
    prediction = found.prediction
    assert prediction is not None
    assert prediction.seconds is not None
    return {
        "model": preset,
        "tokens": length,
        "rows": ROWS,
        "micro_batch_size": found.micro_batch_size,
        "checkpointing": found.recomputed,
        "loss chunk": found.loss_chunk or "the operator's own",
        "attention": found.attention or "torch",
        "live GiB": round(prediction.peak_bytes / 2**30, 2),
        "reserved GiB": round(prediction.reserved_bytes / 2**30, 2),
        "seconds": round(prediction.seconds, 1),
    }


class Kept(Finetune):
    """Keeps the plan of its last step."""

    plan: Plan | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.plan = getattr(self.trainer.strategy, "plan", None)


def run(preset: str, length: int) -> dict[str, Any]:
    """Return the predicted and the counted peak of a simulated run with random weights."""
    torch.manual_seed(0)
    module = Kept(preset=preset, dtype="bfloat16", load_pretrained=False, schedule="constant")
    strategy = UnifiedStrategy(simulate=MACHINE, budget=BUDGET, micro_batch_size=1, check_split=False)
    vocabulary: int = module.policy.config.vocab_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    tokens = torch.randint(vocabulary, (STEPS * RUN_ROWS, length))
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        precision="bf16-mixed",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tokens, RUN_ROWS, collate_fn=labelled_as_they_are))  # pyright: ignore[reportArgumentType]
    found, machine = module.plan, strategy.simulated
    assert found is not None
    assert found.prediction is not None
    assert machine is not None
    predicted, counted = found.prediction.peak_bytes, machine.allocator.peak
    return {
        "model": preset,
        "tokens": length,
        "rows": RUN_ROWS,
        "steps": trainer.global_step,
        "micro_batch_size": found.micro_batch_size,
        "checkpointing": found.recomputed,
        "attention": found.attention or "torch",
        "loss chunk": found.loss_chunk or "the operator's own",
        "predicted MiB": round(predicted / 2**20, 2),
        "counted MiB": round(counted / 2**20, 2),
        "ratio": round(predicted / counted, 4),
    }


def labelled_as_they_are(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch whose tokens are all scored."""
    tokens = torch.stack(rows)
    return {"tokens": tokens, "labels": tokens.clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("finetune-plans")
    torch.set_num_threads(os.cpu_count() or 1)
    budget = resolve_budget(BUDGET, SimulatedMachine(MACHINE).reading()).bytes
    record = origin("python -m benchmarks.models.finetune.plans")
    record |= {"simulated": MACHINE, "budget": BUDGET, "budget_bytes": budget, "plans": [], "runs": []}
    if arguments.output.exists():
        known = json.loads(arguments.output.read_text(encoding="utf-8"))
        record |= {name: known.get(name, []) for name in ("plans", "runs")}
    for preset, length in CASES[len(record["plans"]) :]:
        record["plans"].append(planned(preset, length, budget=budget))
        write(record, arguments.output)
    if not record["runs"]:
        record["runs"].append(run(*RUN))
        write(record, arguments.output)
    for kind in ("plans", "runs"):
        print(markdown({str(at): one for at, one in enumerate(record[kind])}, first=kind))


if __name__ == "__main__":
    main()
