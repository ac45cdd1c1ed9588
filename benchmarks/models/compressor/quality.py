"""Train the compressor's CPU preset and compare its policy with all baselines.

Documents are held out.

Usage: python -m benchmarks.models.compressor.quality [--minutes 8]       (about 20 minutes on two cores in all)

Two readers judge the same choices of tokens: the compressor's own, which has learnt from its own policy's masks and is what a
user would have, and a copy that has then practised on the masks of all methods in turn, so that no method's are strange to it.
The bar: at .3, .5 and .7 the policy's cross-entropy of dropped tokens is below that of random, frequency, position and length,
with 95 % intervals apart, under both readers. The exit code says whether it is met.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from benchmarks.models.compressor.practice import JudgedBy, practise
from benchmarks.records import origin
from lightning_unified.models.compressor.data.passage_data import PassageData
from lightning_unified.models.compressor.evaluation import baselines, held_out
from lightning_unified.models.compressor.evaluation.evaluate import EvaluationOptions, evaluate
from lightning_unified.models.compressor.evaluation.report import plot
from lightning_unified.models.compressor.inference import checkpoint
from lightning_unified.models.compressor.inference.compress import compress
from lightning_unified.models.compressor.module import Compressor

RECORD = Path(__file__).with_suffix(".json")
BARRED, BUDGETS = ("random", "frequency", "position", "length"), (0.3, 0.5, 0.7)
SEED = 0
PRACTICE = 0.3  # of the training's minutes
EXAMPLES, EXAMPLE_CHARACTERS = 3, 400


class Clock(Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def fit(data: PassageData, *, steps: int, arguments: dict[str, Any]) -> tuple[L.Trainer, Compressor, Clock]:
    """Train so many steps and return what did, what was, and when."""
    L.seed_everything(SEED, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_model_summary=False,
        limit_val_batches=0, enable_progress_bar=False, gradient_clip_val=1.0, callbacks=[clock],
    )  # fmt: skip
    module = Compressor(**arguments)
    trainer.fit(module, data)
    return trainer, module, clock


def train(data: PassageData, *, minutes: float, steps: int | None, path: Path, arguments: dict[str, Any]) -> dict:
    """Train for the given minutes, save, and return a record of the training.

    A few steps beforehand give the number of steps that these minutes allow.
    """
    if steps is None:
        _, _, clock = fit(data, steps=12, arguments=arguments)
        steps = max(30, round(60 * minutes * 8 / (clock.ends[-1] - clock.ends[-9])))
    begun = time.perf_counter()
    trainer, module, _ = fit(data, steps=steps, arguments=arguments)
    seconds = time.perf_counter() - begun
    trainer.save_checkpoint(path)
    return {
        "arguments": arguments,
        "policy_parameters": sum(weight.numel() for weight in module.codec.policy.parameters()),
        "reader_parameters": sum(weight.numel() for weight in module.codec.reader.parameters()),
        "steps": steps,
        "batch_size": data.batch_size,
        "seconds": round(seconds, 1),
        "keep_ratio": {"target": module.price.target, "last": float(trainer.callback_metrics["train/keep_ratio"])},
        "collapsed": module.collapse.found(),
        "data": {**dict(data.hparams), "describe": data.describe()},
    }


def bar(record: dict[str, Any]) -> dict[str, Any]:
    """Return whether the bar is met under this reader, and which figures miss it.

    The result also compares the policy with LM surprisal.
    """
    compared = [row for row in record["policy_against"] if row["measure"] == "dropped_cross_entropy"]
    barred = [row for row in compared if row["baseline"] in BARRED and row["keep"] in BUDGETS]
    missed = [f"{row['baseline']} at {row['keep']}" for row in barred if row["intervals"] != "policy"]
    return {
        "met": len(barred) == len(BARRED) * len(BUDGETS) and not missed,
        "missed": missed,
        "against_lm_surprisal": [
            {key: row[key] for key in ("keep", "measure", "difference", "p_value", "intervals")}
            for row in record["policy_against"]
            if row["baseline"] == "lm_surprisal"
        ],
    }


def configured(preset: str) -> dict[str, Any]:
    """Return the arguments that `model=` of that name gives `Compressor`.

    Arguments that depend on the hardware are left out. The tests' preset has no such file.
    """
    path = Path(__file__).parents[3] / "conf" / "model" / f"{preset}.yaml"
    if not path.exists():
        return {"preset": preset}
    leaf = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {key: value for key, value in leaf.items() if key not in {"_target_", "optimizer_kernel"}}


def examples(module: Compressor, texts: list[str]) -> list[dict[str, str]]:
    """Return a few beginnings of held-out documents and half of their tokens."""
    beginnings = [text[:EXAMPLE_CHARACTERS] for text in texts[:EXAMPLES]]
    return [{"text": text, "half": compress(text, keep=0.5, module=module).text} for text in beginnings]


def judge(subject: Any, texts: list[str], *, corpus: list[str], length: int, options: argparse.Namespace) -> dict:
    """Return the record of one reader's evaluation, with the bar, and print the main table."""
    record = evaluate(
        subject,
        texts[: options.documents],
        corpus=corpus,
        options=EvaluationOptions(length=length, per_document=options.per_document, seed=SEED),
    )
    record["bar"] = bar(record)
    for row in record["rows"]:
        lost, perplexity = row["dropped_cross_entropy"], row["continuation_perplexity"]
        print(
            f"{row['method']:16} keep {row['keep']}: {lost['mean']:.3f} [{lost['low']:.3f}, {lost['high']:.3f}] nats per dropped "
            f"token, continuation {perplexity['mean']:.2f}, ROUGE-L {row['rouge_l']['mean']:.3f}"
        )
    print(json.dumps(record["bar"], indent=1), flush=True)
    return record


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="of training; practice and judging come on top")
    parser.add_argument("--steps", type=int, help="so many steps instead, for the same run on another machine")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text, in training and after it")
    parser.add_argument("--documents", type=int, default=120, help="held-out documents at most")
    parser.add_argument("--per-document", type=int, default=1, help="pieces of each")
    parser.add_argument(
        "--max-groups", type=int, default=300, help="services of the documentation, half of them held out"
    )
    parser.add_argument(
        "--preset", default="compressor-small", help="sizes; compressor-tiny to see whether all of this runs"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="arguments of Compressor")
    parser.add_argument("--checkpoint", type=Path, help="keep the checkpoint here")
    parser.add_argument("--output", type=Path, default=RECORD)
    options = parser.parse_args()
    given = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in options.set)}
    arguments = {**configured(options.preset), **given}
    begun = time.perf_counter()
    sizes = Compressor(**arguments).config
    data = PassageData(
        source="botocore", max_groups=options.max_groups, val_fraction=0.5, seed=SEED,
        text_length=options.length, vocab_size=sizes.reader.vocabulary,
    )  # fmt: skip
    record = origin(" ".join(["python", "benchmarks/models/compressor/quality.py", *sys.argv[1:]]))
    record["threads"] = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint or Path(folder, "compressor.ckpt")
        record["training"] = train(data, minutes=options.minutes, steps=options.steps, path=path, arguments=arguments)
        module = checkpoint.load(path, device="cpu")
    print(json.dumps(record["training"], indent=1), flush=True)
    corpus, texts = held_out.sides(data.hparams)
    length = module.text_length
    record["own_reader"] = judge(module, texts, corpus=corpus, length=length, options=options)
    write(record, options.output)
    methods = {
        "policy": module.keep_logits,
        **baselines.scorers(module, corpus=data.train_documents, vocabulary=module.config.reader.vocabulary, seed=SEED),
    }
    reader = practise(module, data.rows[0], methods=methods, minutes=PRACTICE * options.minutes, seed=SEED)
    judged = JudgedBy(policy=module, reader=reader)
    record["practice"] = {"steps": reader.trained_steps - module.trained_steps, "minutes": PRACTICE * options.minutes}
    record["practised_reader"] = judge(judged, texts, corpus=corpus, length=length, options=options)
    record["examples"] = examples(module, texts)
    record["seconds_from_start_to_end"] = round(time.perf_counter() - begun, 1)
    write(record, options.output)
    for name in ("own_reader", "practised_reader"):
        plot(record[name], options.output.with_name(f"{options.output.stem}_{name}.png"))
    return 0 if record["own_reader"]["bar"]["met"] and record["practised_reader"]["bar"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
