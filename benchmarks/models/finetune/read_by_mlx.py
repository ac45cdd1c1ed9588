"""Models that `merge` writes, read by mlx-lm: its logits and tokens beside this package's.

Each family of the presets is built small, with random weights and random LoRA adapters, and merged to a folder. SmolLM2-135M-Instruct from its
package is merged with adapters as well. mlx-lm, in an environment of its own, loads each folder, computes the logits of one text and continues
it greedily. Both sides compute in float32 on the CPU. **No Mac was used**: mlx runs on its CPU build.

Usage: python3 -m venv mlx && mlx/bin/pip install "mlx[cpu]" mlx-lm
       python -m benchmarks.models.finetune.read_by_mlx --python mlx/bin/python
       (writes benchmarks/models/finetune/read_by_mlx.json)
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified.models.causal_lm.language_model import causal_lm, evaluating
from lightning_unified.models.finetune import Finetune, FinetuneData
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.models.finetune.use.export import merged, write_merged

RESULTS = Path(__file__).with_suffix(".json")
BAR = 1e-3  # of the largest logit: rounding of float32 in two libraries
PACKAGED = "smollm2_135m"
NEW_TOKENS, VOCABULARY = 8, 320
# One preset of each architecture, with its own switches and small sizes.
# mlx-lm's Gemma 3 needs six layers: it has one global attention in six.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES = ("smollm2_135m", "llama3_2_1b", "qwen2_5_0_5b", "qwen3_0_6b", "gemma3_1b")

_READER = """
import json, sys
import mlx.core as mx
import mlx_lm
from importlib.metadata import version
folder, count, *ids = sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:])
mx.set_default_device(mx.cpu)
model, tokenizer = mlx_lm.load(folder)
logits = model(mx.array([ids])).astype(mx.float32)[0]
tokens = list(ids)
for _ in range(count):
    tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
print(json.dumps({"logits": logits.tolist(), "tokens": tokens[len(ids):], "text": tokenizer.decode(ids),
                  "versions": {name: version(name) for name in ("mlx", "mlx-lm")}}))
"""


def small(preset: str) -> Finetune:
    """Return a small random model of the preset's family."""
    architecture = {**PRESETS[preset].architecture, **SMALL, "vocab_size": VOCABULARY, "initializer_range": 0.2}
    return Finetune(architecture=architecture, lora_rank=4)


def trained(module: Finetune, folder: Path, **data: Any) -> Finetune:
    """Train one step, so that the module has a tokenizer, and enlarge its adapters."""
    folder.mkdir()
    pairs = [
        {"prompt": f"What is {number} plus {number}?", "completion": f"It is {2 * number}."} for number in range(8)
    ]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    rows = FinetuneData(path=str(folder / "pairs.jsonl"), batch_size=2, sequence_length=64, val_fraction=0.25, **data)
    quiet: Any = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", default_root_dir=folder, **quiet).fit(module, rows)
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:  # they start at zero
                parameter.normal_(std=0.02)
    return module.eval()


@torch.no_grad()
def continued(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[int]]:
    """Return the logits of `ids` of shape `(1, length)` and the greedy continuation."""
    with evaluating(model):
        logits = causal_lm(model)(input_ids=ids).logits[0].float()
        tokens = ids
        for _ in range(NEW_TOKENS):
            following = causal_lm(model)(input_ids=tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, following.view(1, 1)], 1)
    return logits, tokens[0, ids.shape[1] :].tolist()


def compared(name: str, module: Finetune, folder: Path, *, python: str) -> dict[str, Any]:
    """Merge the model to `folder`, and compare both readers."""
    write_merged(module, folder, dtype="float32")
    text = "The quick brown fox asks: what does shlex.quote do?"
    ids = torch.tensor([module.chat.backend.encode(text, add_special_tokens=False).ids[:24]])
    logits, tokens = continued(module.policy, ids)
    arguments = [python, "-c", _READER, str(folder), str(NEW_TOKENS), *map(str, ids[0].tolist())]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: mlx-lm ended with {done.returncode}:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    distance = (torch.tensor(theirs["logits"])[:, : logits.shape[1]] - logits).abs().max() / logits.abs().max()
    return {
        "model": name,
        "architecture": module.policy.config.model_type,  # pyright: ignore[reportAttributeAccessIssue]
        "parameters": sum(parameter.numel() for parameter in merged(module.policy).parameters()),
        "largest logit difference": float(f"{float(distance):.2g}"),
        "same tokens": tokens == theirs["tokens"],
        "same text": theirs["text"] == module.chat.backend.decode(ids[0].tolist()),
        "readers": theirs["versions"],
    }


def main() -> int:
    """Compare all models, print a table, write the record; return 1 if a model differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has mlx-lm")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the record goes")
    asked = parser.parse_args()
    folder, runs = prepare("read-by-mlx"), []
    torch.manual_seed(0)
    for preset in FAMILIES:
        module = trained(small(preset), folder / preset, vocab_size=VOCABULARY)
        runs.append(compared(f"{preset}, small", module, folder / preset / "merged", python=asked.python))
    whole = trained(Finetune(preset=PACKAGED, lora_rank=4), folder / "whole")
    runs.append(compared(PACKAGED, whole, folder / "whole" / "merged", python=asked.python))
    readers = {name: value for run in runs for name, value in run.pop("readers").items()}
    made = origin("python -m benchmarks.models.finetune.read_by_mlx --python PYTHON")
    write(
        {**made, "readers": readers, "hardware": "mlx's CPU build; not run on a Mac", "bar": BAR, "runs": runs},
        asked.output,
    )
    print(
        markdown(
            {run["model"]: {name: value for name, value in run.items() if name != "model"} for run in runs},
            first="model",
        )
    )
    return int(
        any(run["largest logit difference"] > BAR or not run["same tokens"] or not run["same text"] for run in runs)
    )


if __name__ == "__main__":
    sys.exit(main())
