"""Peak memory and speed of the compressor on a GPU, beside its seed's claims.

    python -m benchmarks.models.compressor.memory [--preset compressor-125m] [--rows 32] [--micro 8] [--tokens 512]
       (writes benchmarks/models/compressor/memory.json; about two minutes on one H200)

The seed's claims: one joint backward pass in place of two with retain_graph saves 40 to 60 % of memory; micro-batches divide it by 8;
in-place noise saves 20 % of the forward pass. Here each technique is switched by itself, everything else alike:

- backward: the joint loss; the policy's and the reader's losses one after the other, the first with retain_graph; and the same with a
  reward that is not detached, as the seed had it, so that the policy's loss goes back through the reader as well;
- batch: undivided and in micro-batches, in plain Lightning, under the unified strategy at a stated size, and under its planner in a budget;
- noise: bytes that are alive after a relaxed forward pass, in place and by the plain formula of two Gumbel numbers.

Peaks are torch's own, of live tensors, from the third step on; speeds are of the same steps. On a CPU there is no such peak: null.
"""

import argparse
import json
import logging
import platform
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.models.compressor import Compressor
from lightning_unified.models.compressor.objective import estimators as objectives
from lightning_unified.models.compressor.objective import joint
from lightning_unified.models.compressor.sizes import preset as preset_config

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

WARM, TIMED = 2, 3
CLAIMS = {"joint backward": "saves 40 to 60 %", "micro-batches": "divide by 8", "noise in place": "saves 20 %"}


class Peaks:
    """The peak of live tensors and the time of some steps."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.bytes = self.seconds = None

    def begin(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()

    def end(self, steps):
        if self.cuda:
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated()
        self.seconds = (time.perf_counter() - self._since) / steps


class Measured(L.Callback):
    """Takes the peak and the time of the steps after the warm-up."""

    def __init__(self, device):
        self.peaks, self.sizes = Peaks(device), None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == WARM:
            self.peaks.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == WARM + TIMED - 1:
            self.peaks.end(TIMED)


def build(asked, **changes):
    torch.manual_seed(0)
    return Compressor(preset=asked.preset, schedule="constant", warmup_steps=0, **changes)


def make_batch(asked):
    generator = torch.Generator().manual_seed(1)
    vocabulary = preset_config(asked.preset).reader.vocabulary
    ids = torch.randint(9, vocabulary, (asked.rows, asked.tokens), generator=generator)
    return {"input_ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool)}


def autocast(asked, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=asked.precision == "bf16-mixed")


def attached(logits, *, keep, distortion, mask):
    """The REINFORCE term with a reward that is not detached: what the seed had."""
    weights = objectives.advantages(-distortion)
    return -(weights * objectives.log_probability(logits, keep=keep, mask=mask)).mean(1)


def by_hand(asked, device, *, way):
    """Train in a plain loop with the backward pass in `way`; return peak and speed."""
    model = build(asked, objective="reinforce").to(device)
    batch = {name: values.to(device) for name, values in make_batch(asked).items()}
    own = objectives.reinforce
    objectives.reinforce = attached if way == "retain_graph, reward attached" else own
    policy = list(model.codec.policy.parameters())
    groups = [policy, [one for one in model.codec.parameters() if not any(one is p for p in policy)]]
    optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=device.type == "cuda") for group in groups]
    peaks = Peaks(device)
    try:
        for step in range(WARM + TIMED):
            if step == WARM:
                peaks.begin()
            model.zero_grad()
            prepared = model.prepare_batch(batch)
            with autocast(asked, device):
                embeddings = model.codec.reader.embed(prepared["input_ids"])
                logits = model.codec.keep_logits(embeddings, prepared["mask"])
                parts = model.joint.parts(
                    model.codec, prepared, embeddings=embeddings, logits=logits, price=model.price.value
                )
            rest = parts["distortion"] + parts["language"]
            if way == "joint":
                (parts["policy"] + rest).backward()
            else:
                parts["policy"].backward(retain_graph=True)
                rest.backward()
            del parts, rest, embeddings, logits
            for optimizer in optimizers:
                optimizer.step()
        peaks.end(TIMED)
    finally:
        objectives.reinforce = own
    return outcome(asked, peaks)


def trained(asked, device, *, strategy):
    """Train under Lightning with `strategy`; return peak, speed and the size of a micro-batch."""
    model, measured = build(asked, objective="reinforce"), Measured(device)
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision=asked.precision,
        max_steps=WARM + TIMED,
        callbacks=[measured],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader([make_batch(asked)] * (WARM + TIMED), batch_size=None)
    trainer.fit(model, loader)
    found = outcome(asked, measured.peaks)
    if isinstance(strategy, UnifiedStrategy) and strategy.plan is not None:
        found["micro_batch_size"] = strategy.plan.micro_batch_size
    return found


def outcome(asked, peaks):
    tokens = asked.rows * asked.tokens
    return {"peak_bytes": peaks.bytes, "tokens_per_second": tokens / peaks.seconds, "seconds_per_step": peaks.seconds}


def plain_gumbels(logits, *, uniform, temperature):
    """The gate as it is written down: two Gumbel numbers, one operation after the other."""
    one, two = (torch.rand(uniform.shape, device=logits.device).clamp(1e-7, 1 - 1e-7) for _ in range(2))
    return torch.sigmoid((logits - torch.log(-torch.log(one)) + torch.log(-torch.log(two))) / temperature)


def forward_bytes(asked, device, *, gate):
    """Return bytes alive after a relaxed forward pass, without weights and batch.

    The second figure is the random numbers' share of them.
    """
    model = build(asked, objective="relaxed").to(device)
    batch = {name: values[: asked.micro].to(device) for name, values in make_batch(asked).items()}
    prepared, own = model.prepare_batch(batch), joint.relaxed_bernoulli
    joint.relaxed_bernoulli = gate or own
    try:
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with autocast(asked, device):
            loss = model.training_step(prepared)["loss"]
        after = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        del loss
    finally:
        joint.relaxed_bernoulli = own
    alive = after - before if device.type == "cuda" else None
    return {"forward_bytes": alive, "noise_bytes": prepared["noise"].nbytes}


def measure(asked, device):
    """Return every case by name; what one leaves behind is freed before the next."""
    sized = {"predict": False, "check_split": False}
    cases = {
        "joint backward": lambda: by_hand(asked, device, way="joint"),
        "two passes, retain_graph": lambda: by_hand(asked, device, way="retain_graph"),
        "two passes, retain_graph, reward attached": lambda: by_hand(
            asked, device, way="retain_graph, reward attached"
        ),
        "Lightning, undivided": lambda: trained(asked, device, strategy="auto"),
        "unified, undivided": lambda: trained(
            asked, device, strategy=UnifiedStrategy(micro_batch_size=asked.rows, **sized)
        ),
        "unified, micro-batches": lambda: trained(
            asked, device, strategy=UnifiedStrategy(micro_batch_size=asked.micro, **sized)
        ),
        f"unified, planned in {asked.budget}": lambda: trained(
            asked, device, strategy=UnifiedStrategy(budget=asked.budget)
        ),
        "relaxed forward, noise in place": lambda: forward_bytes(asked, device, gate=None),
        "relaxed forward, two Gumbel numbers": lambda: forward_bytes(asked, device, gate=plain_gumbels),
    }
    found = {}
    for name, case in cases.items():
        since = time.perf_counter()
        found[name] = case()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - since:.0f} s", file=sys.stderr, flush=True)
    return found


def table(found):
    """Return the cases as a table, each beside the seed's claim about it."""
    gib = 2**30
    rows = ["| case | peak GiB | of undivided | tokens/s | seed's claim |", "|---|---|---|---|---|"]
    reference = found["joint backward"]["peak_bytes"]
    for name, case in found.items():
        size = case.get("peak_bytes", case.get("forward_bytes"))
        share = "" if not size or not reference or "peak_bytes" not in case else f"{size / reference:.0%}"
        speed = f"{case['tokens_per_second']:,.0f}" if "tokens_per_second" in case else ""
        claim = next((text for part, text in CLAIMS.items() if part in name), "")
        shown = "" if size is None else f"{size / gib:.2f}"
        micro = f" ({case['micro_batch_size']} rows)" if "micro_batch_size" in case else ""
        rows.append(f"| {name}{micro} | {shown} | {share} | {speed} | {claim} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="compressor-125m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16-mixed", choices=("32-true", "bf16-mixed"))
    parser.add_argument("--rows", type=int, default=32, help="texts of a batch")
    parser.add_argument("--micro", type=int, default=8, help="texts of a micro-batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a text")
    parser.add_argument("--budget", default="16GiB", help="what the planner may use")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    asked = parser.parse_args()
    device = torch.device(asked.device)
    found = measure(asked, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    settings = {key: value for key, value in vars(asked).items() if key not in {"output", "device"}}
    document = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "torch": torch.__version__,
        "settings": settings,
        "cases": found,
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
