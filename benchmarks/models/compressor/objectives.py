"""Train the compressor's CPU preset by either objective in equal CPU time, and compare.

Usage: python -m benchmarks.models.compressor.objectives [--minutes 4]       (about 11 CPU minutes in all)

One process trains both in turns of a few steps, always the one that has used the least CPU time (`time.process_time`, one
thread). So other work on the machine slows both alike. They have the same data in the same order, the same first weights, and a
learning rate that falls to 0 at the end of their time. Each policy is judged by its own reader, beside baselines under that reader.

`gradient_noise` shows one cause of differences: on one batch, at the weights that the relaxed objective has learnt, the policy's
gradient is drawn often under either objective. It is the mean square of the draws' deviation, over the square of their mean.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.compressor.quality import configured, write
from benchmarks.records import markdown, origin
from lightning_unified.models.compressor.data.passage_data import PassageData
from lightning_unified.models.compressor.evaluation import held_out
from lightning_unified.models.compressor.evaluation.evaluate import EvaluationOptions, evaluate
from lightning_unified.models.compressor.module import Compressor

RECORD = Path(__file__).with_suffix(".json")
ARMS: dict[str, dict[str, Any]] = {name: {"objective": name, "masks": 2} for name in ("relaxed", "reinforce")}
SHOWN = ("policy", "random", "lm_surprisal")
KEEPS = (0.3, 0.5, 0.7)
SEED, BATCH, TURN, DRAWS = 0, 32, 5, 64


class Arm:
    """One compressor in training, with the CPU seconds that it has used."""

    def __init__(self, arguments: dict[str, Any], data: PassageData, *, seconds: float) -> None:
        torch.manual_seed(SEED)
        self.module = Compressor(**arguments)
        self.module.attach_tokenizer(data.tokenizer)
        self.module.trained_length = data.text_length
        policy = list(self.module.codec.policy.parameters())
        own = set(map(id, policy))
        reader = [weight for weight in self.module.codec.parameters() if id(weight) not in own]
        given = self.module.hparams
        self._rates = (given["policy_learning_rate"], given["learning_rate"])
        groups = [{"params": policy, "weight_decay": given["policy_weight_decay"]}, {"params": reader}]
        self._optimizer = torch.optim.AdamW(
            groups, betas=given["betas"], eps=given["eps"], weight_decay=given["weight_decay"]
        )
        self._batches, self._generator = _batches(data), torch.get_rng_state()
        self._seconds, self.used, self.steps, self.kept = seconds, 0.0, 0, 0.0

    def turn(self) -> None:
        """Train a few steps with random numbers of its own."""
        torch.set_rng_state(self._generator)
        begun = time.process_time()
        for _ in range(TURN):
            self._step()
        self.used += time.process_time() - begun
        self._generator = torch.get_rng_state()

    def _step(self) -> None:
        share = min(1.0, (self.steps + 1) / self.module.hparams["warmup_steps"]) * max(
            0.0, 1 - self.used / self._seconds
        )
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        terms = self.module.training_step(self.module.prepare_batch(next(self._batches)))
        self._optimizer.zero_grad()
        terms["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._optimizer.step()
        with torch.no_grad():
            ratio = terms["kept"].sum() / terms["tokens"].sum()
            self.module.price.update(ratio)
            self.module.collapse.update(ratio=ratio, spread=terms["spread"].sum() / terms["texts"].sum())
        self.steps, self.kept = self.steps + 1, float(ratio)


def _batches(data: PassageData) -> Iterator[dict[str, Tensor]]:
    rows, generator = data.rows[0], torch.Generator().manual_seed(SEED)
    while True:
        for chosen in torch.randperm(len(rows), generator=generator).split(BATCH):
            if len(chosen) == BATCH:
                yield rows.__getitems__(chosen.tolist())


def train(data: PassageData, *, arguments: dict[str, Any], minutes: float) -> dict[str, Arm]:
    """Return the trained arms; each has used the same CPU time, up to one turn."""
    arms = {name: Arm({**arguments, **own}, data, seconds=60 * minutes) for name, own in ARMS.items()}
    while (least := min(arms.values(), key=lambda arm: arm.used)).used < 60 * minutes:
        least.turn()
    for arm in arms.values():
        arm.module.trained_steps = arm.steps
        arm.module.eval()
    return arms


def judged(arm: Arm, data: PassageData, *, documents: int) -> dict[str, Any]:
    """Return the record of one arm: training, and policy beside baselines under its reader."""
    corpus, texts = held_out.sides(data.hparams)
    options = EvaluationOptions(
        keeps=KEEPS, length=data.text_length, per_document=1, reconstruct=False, repeats=0, seed=SEED
    )
    found = evaluate(arm.module, texts[:documents], corpus=corpus, options=options)
    rows = [row for row in found["rows"] if row["method"] in SHOWN]
    return {
        "steps": arm.steps,
        "cpu_seconds": round(arm.used, 1),
        "keep_ratio": {"target": arm.module.price.target, "last": arm.kept},
        "collapsed": arm.module.collapse.found(),
        "documents": found["documents"],
        "language_model": found["language_model"],
        "dropped_cross_entropy": {
            name: {str(row["keep"]): row["dropped_cross_entropy"] for row in rows if row["method"] == name}
            for name in SHOWN
        },
    }


def gradient_noise(trained: Compressor, data: PassageData, *, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the relative noise of the policy's gradient by objective, at equal weights."""
    batch = next(_batches(data))
    found = {}
    for name, own in ARMS.items():
        torch.manual_seed(SEED)
        module = Compressor(**{**arguments, **own})
        module.load_state_dict(trained.state_dict())
        draws = torch.stack([_policy_gradient(module, batch) for _ in range(DRAWS)])
        mean = draws.mean(0)
        deviation = float((draws - mean).square().sum() / (DRAWS - 1))
        found[name] = deviation / max(
            float(mean.square().sum()) - deviation / DRAWS, 1e-30
        )  # unbiased square of the mean
    return found


def _policy_gradient(module: Compressor, batch: dict[str, Tensor]) -> Tensor:
    module.zero_grad()
    module.training_step(module.prepare_batch(batch))["loss"].backward()
    gradients = [weight.grad for weight in module.codec.policy.parameters() if weight.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="of CPU time for each objective")
    parser.add_argument("--documents", type=int, default=100, help="held-out documents at most")
    parser.add_argument("--max-groups", type=int, default=300, help="services of the documentation, half held out")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--preset", default="compressor-small", help="compressor-tiny to see whether all of this runs")
    parser.add_argument("--output", type=Path, default=RECORD)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    arguments = configured(options.preset)
    vocabulary = Compressor(**arguments).config.reader.vocabulary
    data = PassageData(
        source="botocore", max_groups=options.max_groups, val_fraction=0.5, seed=SEED,
        text_length=options.length, vocab_size=vocabulary,
    )  # fmt: skip
    record = origin(" ".join(["python -m benchmarks.models.compressor.objectives", *sys.argv[1:]]))
    record["threads"] = torch.get_num_threads()
    record["time"] = "CPU seconds of the process, in turns of a few steps; the machine also did other work"
    arms = train(data, arguments=arguments, minutes=options.minutes)
    record["arms"] = {name: judged(arm, data, documents=options.documents) for name, arm in arms.items()}
    first = next(iter(arms.values())).module
    record["gradient_noise"] = gradient_noise(first, data, arguments=arguments)
    write(record, options.output)
    print(markdown(_table(record), first="objective"))
    return 0


def _table(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, arm in record["arms"].items():
        policy = arm["dropped_cross_entropy"]["policy"]
        cells = {f"keep {keep}": _interval(policy[str(keep)]) for keep in KEEPS}
        rows[name] = {"steps": arm["steps"], **cells, "gradient noise": record["gradient_noise"][name]}
    return rows


def _interval(found: dict[str, float]) -> str:
    return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
