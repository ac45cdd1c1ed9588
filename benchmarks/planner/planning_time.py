"""CPU seconds of the models' plans, beside those of the largest network as a plain module.

Each plan runs in a process of its own. The record holds the CPU seconds of the whole process (user and system), those before the first dry run
(imports, configuration and the module without its weights), the number of dry runs, and the ratio of the seconds to those of the plain module
in the same run. A bare process that only imports torch and Lightning stands beside them.

A last cell plans a fit of ragged rows: the 60 batches and the decoder of `benchmarks/overhead/ragged_lengths.py`, on a simulated H200. Its
batches are planned and not computed. Its seconds are those of planning alone, for all lengths.

Usage: python -m benchmarks.planner.planning_time      (writes benchmarks/planner/records/planning_time_cpu.json; four minutes on one core)
"""

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.overhead.ragged_lengths import FULL, Decoder, Texts
from benchmarks.records import origin, prepare, write
from lightning_unified import UnifiedStrategy
from lightning_unified.__main__ import run
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.planner.dry_run import DryRun
from lightning_unified.planner.first_batch.first_step import FirstStep
from lightning_unified.planner.predict import plan

RECORD = Path(__file__).parent / "records" / "planning_time_cpu.json"
IMPORTS = "imports of torch and lightning, and no plan"
PLAIN = "the 3B network as a plain module"
RAGGED = "a fit of 60 ragged batches on a simulated H200"
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


class Unlearnt(Decoder):
    """The decoder of ragged rows in a fit that plans its batches and computes next to nothing."""

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if isinstance(batch["input_ids"], FakeTensor):
            return super().training_step(batch, batch_idx)
        return self.net.model.norm.weight.mean() * (batch["labels"][:, 1:] != -100).float().mean()


def run_ragged() -> dict[str, Any]:
    """Plan all batches of a fit in this process, and return where the CPU seconds went."""
    prepare("planning")
    torch.manual_seed(0)
    begun: list[float] = []
    for method in ("run", "go_on"):
        _note_calls(method, begun)
    seconds: list[float] = []
    look = FirstStep.look

    def timed(self: FirstStep, *args: Any, **kwargs: Any) -> None:
        before = time.process_time()
        look(self, *args, **kwargs)
        seconds.append(time.process_time() - before)

    FirstStep.look = timed  # type: ignore[method-assign]
    strategy = UnifiedStrategy(budget=str(FULL["budget"]), simulate="h200", check_split=False)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        strategy=strategy,
        max_steps=FULL["steps"],
        enable_model_summary=False,
        **quiet,
    )
    texts = Texts(FULL, pieces=1)
    trainer.fit(Unlearnt(FULL, checkpointing=False), DataLoader(texts, batch_size=None))
    return {
        "plan": RAGGED,
        "planning_cpu_seconds": round(sum(seconds), 2),
        "of_the_first_batch": round(seconds[0], 2),
        "of_the_slowest_after_two": round(max(seconds[2:]), 2),
        "lengths": len({max(one) for one in texts._lengths}),
        "dry_runs": len(begun),
    }


def run_cell(name: str) -> dict[str, Any]:
    """Plan once in this process; return its dry runs and the CPU seconds before them."""
    if name == RAGGED:
        return run_ragged()
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
            sys.argv = ["lightning-unified", "plan", "--json", *name.split()]
            fits = run() == 0
    return {
        "plan": name,
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


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run all cells, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args()
    if asked.cell is not None:
        print(json.dumps(run_cell(asked.cell)))
        return
    runs: list[dict[str, Any]] = []
    for name in (PLAIN, IMPORTS, *PLANS, RAGGED):
        cell = [sys.executable, "-m", "benchmarks.planner.planning_time", "--cell", name]
        if name == IMPORTS:
            cell = [sys.executable, "-c", f"import json, torch, lightning; print(json.dumps({{'plan': {name!r}}}))"]
        before = _seconds_of_children()
        said = subprocess.run(cell, check=True, capture_output=True, text=True).stdout
        seconds = _seconds_of_children() - before
        runs.append({**json.loads(said.splitlines()[-1]), "cpu_seconds": round(seconds, 2)})
        runs[-1]["ratio_to_plain"] = round(seconds / runs[0]["cpu_seconds"], 2)
        print(json.dumps(runs[-1]), flush=True)
    what = {"what": "CPU seconds of plans, beside those of a plain module"}
    write({**what, **origin("python -m benchmarks.planner.planning_time"), "runs": runs}, asked.record)


if __name__ == "__main__":
    main()
