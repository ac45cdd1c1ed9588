"""Speed, peak and predicted peak of compiled modules in a budget, beside a bare loop.

Four networks train on batches of 32 x 1,024 tokens in bfloat16 autocast: GearHead-118M, a GPT of 124 million parameters that knows
nothing of this package, transformers' Llama of about the same size, and torch's encoder as a classifier. Each cell is a process of its own.
The bare cell of a network measures a compiled loop without Lightning. The other cells run `strategy="unified"` with compiled blocks, or with
a module that the user compiled. "graphs" cells have compiled blocks and the callback `CudaGraphs`. What they record lies in memory that the
allocator reserves: `reserved_bytes` includes it, `peak_bytes` does not. "chunked" cells ask for a loss in chunks of 4,096 rows. The unit of a network's budgets is the peak of its first cell.

Usage: python -m benchmarks.options.blocks.compiled_blocks [network/cell ...] [--steps 126] [--seconds 170]
       (writes benchmarks/options/blocks/compiled_blocks.json; cells that do not fit into the seconds are left out. `--add` keeps the
       other cells of a record from the same versions; cells of another device stay beside them)
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.records import origin, prepare, write

COMMAND = "python -m benchmarks.options.blocks.compiled_blocks"
RESULTS = Path(__file__).with_suffix(".json")
ROWS, LENGTH, CLASSES, WIDTH, HEADS, LAYERS = 32, 1024, 50_304, 768, 12, 12
WARM = 76  # steps before the clock: compilation, the exactness checks up to batch 64, and recordings after it
CELLS = tuple(
    f"{network}/{cell}"
    for network in ("gpt", "gearhead")
    for cell in (
        "bare",
        "blocks",
        "blocks half",
        "blocks quarter",
        "graphs",
        "graphs chunked",
        "graphs half",
        "graphs quarter",
        "whole",
        "user blocks half",
        "whole half",
        "whole quarter",
    )
) + tuple(
    f"{network}/{cell}" for network in ("llama", "encoder") for cell in ("blocks", "blocks half", "blocks quarter")
)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        query, key, value = (
            self.qkv(self.first(hidden)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.down(functional.gelu(self.up(self.second(hidden))))


class Gpt(nn.Module):
    """A decoder with tied embeddings that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Foreign(L.LightningModule):
    """A module that knows nothing of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Gpt()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"], batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-4, fused=True)


def gearhead() -> L.LightningModule:
    from lightning_unified.models.gearhead.module import GearHead

    return GearHead(preset="gearhead-118m", vocabulary=CLASSES, positions=LENGTH, dropout=0.0, schedule="constant")


class Llama(Foreign):
    """A decoder of transformers."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        L.LightningModule.__init__(self)
        config = LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2048,
            use_cache=False,
        )
        self.net = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class Encoder(Foreign):
    """A classifier of torch's encoder layers; its labels are the first tokens' last digits."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.tokens, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 10)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden.mean(1)), batch["labels"][:, 0] % 10)


NETWORKS: dict[str, Callable[[], L.LightningModule]] = {
    "gpt": Foreign,
    "gearhead": gearhead,
    "llama": Llama,
    "encoder": Encoder,
}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random tokens, the same 64 again and again."""

    def __init__(self, network: str, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, CLASSES, (64, LENGTH + 1), generator=generator)
        self._shift, self._count = network == "gpt", steps * ROWS  # GearHead shifts its labels itself

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index % 64]
        return {"input_ids": row[:-1], "labels": row[1:] if self._shift else row[:-1]}


class Clock(L.Callback):
    """Times the steps after the warm-up and counts the peak anew there."""

    def __init__(self, steps: int) -> None:
        self.began = self.seconds = 0.0
        self._steps = steps

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == WARM - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        if index == self._steps - 1:
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - self.began) / (self._steps - WARM)


def bare(network: str, steps: int) -> dict[str, Any]:
    """Train in a compiled loop without Lightning's Trainer."""
    module = NETWORKS[network]().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), 3e-4, fused=True)
    data = Rows(network, 1)
    batch = {name: torch.stack([data[row][name] for row in range(ROWS)]).cuda() for name in data[0]}
    for child in module.children():
        child.compile()
    module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign]
    began = 0.0
    for step in range(steps):
        if step == WARM:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss: Any = module.training_step(batch, step)
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return figures((time.perf_counter() - began) / (steps - WARM))


def figures(seconds: float) -> dict[str, Any]:
    return {
        "ktok_s": round(ROWS * LENGTH / seconds / 1e3, 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def unified(network: str, cell: str, steps: int, peak: int | None) -> dict[str, Any]:
    """Train under the strategy, with a share of the bare loop's peak as budget."""
    from lightning_unified import CudaGraphs, UnifiedStrategy

    module = NETWORKS[network]()
    words = cell.split()
    if "user" in words:
        for child in (module.net if network == "gpt" else module.network).blocks:
            child.compile()
    if words[0] == "whole":
        for child in module.children():
            child.compile()
    share = 0.5 if "half" in words else 0.25 if "quarter" in words else None
    compile_ = "blocks" if words[0] in {"blocks", "graphs"} else False
    strategy = UnifiedStrategy(
        budget="auto" if share is None or peak is None else int(peak * share),
        compile=compile_,
        loss_chunk=4096 if "chunked" in words else "auto",
    )
    clock = Clock(steps)
    began = time.perf_counter()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy=strategy,
        max_steps=steps,
        callbacks=[clock, CudaGraphs()] if words[0] == "graphs" else [clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=None,
    )
    loader = torch.utils.data.DataLoader(Rows(network, steps), batch_size=ROWS, num_workers=4, pin_memory=True)
    plans: list[Any] = []
    clock.on_train_end = lambda *_: plans.append(strategy.plan)  # type: ignore[method-assign]
    trainer.fit(module, loader)
    plan = plans[0]
    return {
        **figures(clock.seconds),
        "fit_s": round(time.perf_counter() - began, 1),
        "budget_bytes": plan.budget_bytes,
        "micro_batch_size": plan.micro_batch_size,
        "recomputed": plan.recomputed,
        "loss_chunk": plan.loss_chunk,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "planning_s": None if plan.prediction is None else round(plan.prediction.planning_seconds, 1),
        "recoveries": strategy.recoveries,
        "compile": plan.reasons.get("compile"),
        "planned": plan.reasons.get("prediction"),
    }


def one(name: str, steps: int, peak: int | None) -> None:
    """Run one cell and print its figures as JSON."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network, cell = name.split("/")
    found = bare(network, steps) if cell == "bare" else unified(network, cell, steps, peak)
    print(json.dumps(found), flush=True)


def recorded() -> list[dict[str, Any]]:
    """Return the runs of the present record; none if it comes from other versions."""
    record = json.loads(RESULTS.read_text())
    return record["runs"] if record["versions"] == origin(COMMAND)["versions"] else []


def unit_of(name: str) -> str:
    """Return the cell whose peak is the unit of a cell's budgets: the first of its network."""
    return next(cell for cell in CELLS if cell.split("/")[0] == name.split("/", maxsplit=1)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", nargs="*", default=list(CELLS))
    parser.add_argument("--steps", type=int, default=126)  # the next check is before batch 128
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()
    if "CELL" in os.environ:
        one(os.environ["CELL"], options.steps, int(os.environ.get("PEAK", "0")) or None)
        return
    prepare("compiled-blocks")
    began = time.monotonic()
    device, kept = torch.cuda.get_device_name(), recorded() if options.add else []
    runs = {run["cell"]: run for run in kept if run["device"] == device}
    others = [run for run in kept if run["device"] != device]
    for name in options.cells:
        left = options.seconds - (time.monotonic() - began)
        if left < 20:
            print(f"{name}: left out, no time is left", flush=True)
            continue
        peak = runs.get(unit_of(name), {}).get("peak_bytes")
        if peak is None and name.endswith(("half", "quarter")):
            print(f"{name}: left out, because {unit_of(name)} gives its budget and is not measured", flush=True)
            continue
        environment = {**os.environ, "CELL": name, "PEAK": str(peak or 0)}
        arguments = [sys.executable, "-m", "benchmarks.options.blocks.compiled_blocks", "--steps", str(options.steps)]
        found: dict[str, Any]
        try:
            ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=left, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
            found = json.loads(lines[-1]) if lines else {"error": ran.stderr[-1500:]}
        except subprocess.TimeoutExpired:
            found = {"error": "no time was left"}
        predicted, true = found.get("predicted_peak_bytes"), found.get("peak_bytes")
        if predicted and true and "graphs" not in name:
            found["error_of_prediction"] = round(predicted / true - 1, 4)
        made = {"cell": name, "device": device, "date": origin(COMMAND)["date"], "steps": options.steps}
        runs[name] = {**made, **found}
        print(json.dumps(runs[name]), flush=True)
        write({**origin(COMMAND), "runs": [*runs.values(), *others]}, RESULTS)


if __name__ == "__main__":
    main()
