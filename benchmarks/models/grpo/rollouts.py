"""Speed of GRPO's sampler by number of rows, beside transformers' `generate`.

The model has Qwen2.5-3B's shape, LoRA of rank 16 on the four attention layers, random weights in bf16, and samples 256 tokens after a
prompt of 148. The first call compiles and records; the fastest of three later ones counts.

Usage: python -m benchmarks.models.grpo.rollouts [--rows 2 8 32 64] [--output FILE]
       (writes benchmarks/models/grpo/rollouts.json)
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.records import origin, prepare, write
from lightning_unified.models.grpo.rollout import Sampler, SamplingOptions

COMMAND = "python -m benchmarks.models.grpo.rollouts"
PROMPT, NEW = 148, 256
GENERATED_ROWS, GENERATED = (8, 32), 64  # of `generate`, which is slow
BARS = {2: ("ms_per_step", 3.0), 32: ("tokens_per_second", 8000)}


def language_model() -> Any:
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(model, adapters).eval()


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def sampled(model: Any, rows: int) -> dict[str, Any]:
    """Return the figures of the sampler for one group of `rows` completions."""
    prompt = torch.randint(5, 150000, (1, PROMPT), device="cuda")
    sampler = Sampler(model, kept_bytes=40 * 2**30)
    options = SamplingOptions(group_size=rows, max_new_tokens=NEW)

    def call() -> None:
        found = sampler(prompt, torch.ones_like(prompt), options)
        assert found.ids.shape == (rows, NEW)
        decodings.append(found.decoding)

    decodings: list[str | None] = []
    torch.cuda.reset_peak_memory_stats()
    first = seconds(call)
    best = min(seconds(call) for _ in range(3))
    sampler.release()
    return {
        "who": "sampler",
        "rows": rows,
        "ms_per_step": round(1e3 * best / NEW, 2),
        "tokens_per_second": round(rows * NEW / best),
        "first_call_s": round(first, 1),
        "decoding": decodings[-1],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def generated(model: Any, rows: int) -> dict[str, Any]:
    """Return the figures of `generate` for `rows` completions."""
    prompt = torch.randint(5, 150000, (1, PROMPT), device="cuda").repeat(rows, 1)

    def call() -> None:
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=GENERATED,
            min_new_tokens=GENERATED,
            do_sample=True,
        )

    seconds(call)
    best = seconds(call)
    return {
        "who": "generate",
        "rows": rows,
        "ms_per_step": round(1e3 * best / GENERATED, 2),
        "tokens_per_second": round(rows * GENERATED / best),
    }


def bars(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        if run["who"] == "sampler" and run["rows"] in BARS:
            figure, wanted = BARS[run["rows"]]
            met = run[figure] <= wanted if figure == "ms_per_step" else run[figure] >= wanted
            found.append({"rows": run["rows"], "figure": figure, "wanted": wanted, "found": run[figure], "met": met})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    prepare("rollouts")
    import peft
    import transformers

    about = origin(COMMAND)
    about["versions"] |= {"transformers": transformers.__version__, "peft": peft.__version__}
    model, runs = language_model(), []
    for work, rows in [*((sampled, one) for one in options.rows), *((generated, one) for one in GENERATED_ROWS)]:
        with torch.no_grad():
            runs.append({**work(model, rows), "device": torch.cuda.get_device_name()})
        print(json.dumps(runs[-1]), flush=True)
        write({**about, "bars": bars(runs), "runs": runs}, options.output)


if __name__ == "__main__":
    main()
