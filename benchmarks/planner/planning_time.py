"""CPU seconds of the models' plans, beside those of the largest network as a plain module.

Each plan runs in a process of its own. The record holds its CPU seconds (user and system), those before the first dry run (imports, configuration
and the module without its weights), the number of dry runs, and the ratio of the seconds to those of the plain module in the same run.

Usage: python -m benchmarks.planner.planning_time      (writes benchmarks/planner/records/planning_time_cpu.json; four minutes on one core)
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.records import origin, prepare, write
from lightning_unified.cli.main import main as command
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.planner.dry_run import DryRun
from lightning_unified.planner.predict import plan

RECORD = Path(__file__).parent / "records" / "planning_time_cpu.json"
PLAIN = "the 3B network as a plain module"
PLANS = (
    "model=wordle/qwen2_5_3b simulate=m5-32gb hardware=mps",
    "model=wordle/qwen2_5_0_5b simulate=rtx3060-12gb hardware=cuda",
    "model=gearhead-34m simulate=m2-16gb hardware=mps",
    "model=gearhead-118m simulate=rtx3060-12gb hardware=cuda",
)


class Plain(L.LightningModule):
    """The network of `wordle/qwen2_5_3b` without adapters, with trained norm weights."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.Qwen2Config(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=11_008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        self.net = transformers.Qwen2ForCausalLM(config)
        self.net.bfloat16()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_("norm" in name)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(**batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), 1e-5)


def run_cell(name: str) -> dict[str, Any]:
    """Plan once in this process, and return its CPU seconds and dry runs."""
    prepare("planning")
    begun: list[float] = []
    for method in ("run", "go_on"):
        _note_calls(method, begun)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if name == PLAIN:
            with torch.device("meta"):
                module = Plain()
            tokens = torch.zeros(8, 384, dtype=torch.long)
            batch, rates = {"input_ids": tokens, "labels": tokens}, tabled_rates("m5-32gb")
            found = plan(module, batch, budget="22.5GiB", device="mps", precision="bf16-mixed", rates=rates)
            fits = found.micro_batch_size is not None
        else:
            fits = command(["plan", "--json", *name.split()]) == 0
    seconds = time.process_time()
    return {
        "plan": name,
        "cpu_seconds": round(seconds, 2),
        "before_the_first_dry_run": round(begun[0], 2),
        "dry_runs": len(begun),
        "fits": fits,
    }


def _note_calls(method: str, begun: list[float]) -> None:
    """Note the CPU seconds at which each dry run begins."""
    call = getattr(DryRun, method)

    def noted(self: DryRun, *args: Any, **kwargs: Any) -> Any:
        begun.append(time.process_time())
        return call(self, *args, **kwargs)

    setattr(DryRun, method, noted)


def main() -> None:
    """Run all cells, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args()
    if asked.cell is not None:
        print(json.dumps(run_cell(asked.cell)))
        return
    runs = []
    for name in (PLAIN, *PLANS):
        cell = [sys.executable, "-m", "benchmarks.planner.planning_time", "--cell", name]
        said = subprocess.run(cell, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(said.splitlines()[-1]))
        runs[-1]["ratio_to_plain"] = round(runs[-1]["cpu_seconds"] / runs[0]["cpu_seconds"], 2)
        print(json.dumps(runs[-1]), flush=True)
    what = {"what": "CPU seconds of plans, beside those of a plain module"}
    write({**what, **origin("python -m benchmarks.planner.planning_time"), "runs": runs}, asked.record)


if __name__ == "__main__":
    main()
