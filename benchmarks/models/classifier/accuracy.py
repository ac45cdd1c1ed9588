"""Measure the classifier's accuracy on unseen texts.

The corpora are 20 Newsgroups and R8 on their official splits, and BBC news without copies.

Each run is what `train.py experiment=classification` makes, with another seed: `LabelData`, `TextClassifier` from pretrained MiniLM,
`UnifiedStrategy`, the device's own precision, gradients clipped at 1, early stopping and the best checkpoint by macro F1 on validation, and
the test once, of that checkpoint. The seed draws head, dropout, the order of rows and what is held out for validation; of BBC, which has no
official test, the test as well. Copies and near copies of a test text are out of the training side (docs/models/classifier_data.md).

The interval of the mean is Student's over seeds; Wilson's is that of a share of so many test texts. Beside them the accuracy of tf-idf
with a linear model on the same official splits, which was measured apart from this script (0.840 and 0.975).

Usage: python -m benchmarks.models.classifier.accuracy [--only bbc r8 20newsgroups] [--seeds 0 1 2 3 4] [--device cuda]
       (adds each run to benchmarks/models/classifier/accuracy.json and leaves out those that are in it with the same settings)
       python -m benchmarks.models.classifier.accuracy --join FILE FILE
       (makes that record of several, which processes side by side on one machine wrote to an `--output` of their own)
"""

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping

from benchmarks.records import origin, write
from lightning_unified import GradientHealth, MemoryMonitor, PressureGuard
from lightning_unified.callbacks import RunCheckpoint, RunCSVLogger
from lightning_unified.models.classifier import LabelData, TextClassifier
from lightning_unified.strategies import UnifiedStrategy

RESULTS = Path(__file__).with_suffix(".json")
MONITOR = "val/macro_f1"
SETTINGS: dict[str, dict[str, Any]] = {
    "bbc": {"text_length": 256, "batch_size": 32, "epochs": 5, "learning_rate": 1e-4, "label_smoothing": 0.0},
    "r8": {"text_length": 256, "batch_size": 32, "epochs": 6, "learning_rate": 1e-4, "label_smoothing": 0.0},
    "20newsgroups": {"text_length": 512, "batch_size": 32, "epochs": 8, "learning_rate": 2e-4, "label_smoothing": 0.1},
}
AIMS = {"bbc": 0.96, "r8": 0.975, "20newsgroups": 0.840}
TF_IDF = {"r8": 0.975, "20newsgroups": 0.840}
WILSON_Z = 1.959964
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # the 97.5 % points of 1 to 9 degrees of freedom


def main() -> None:
    options = _options()
    if options.join:
        write(joined(options.join), options.output)
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"] if options.output.exists() else []
    for source in options.only:
        for seed in options.seeds:
            settings = _settings(source, options)
            if any((run["source"], run["seed"], run["settings"]) == (source, seed, settings) for run in runs):
                continue
            runs.append({"source": source, "seed": seed, "settings": settings} | train(source, seed, settings, options))
            known = origin("python -m benchmarks.models.classifier.accuracy")
            known["versions"]["transformers"] = version("transformers")
            write({**known, "aims": AIMS, "tf_idf": TF_IDF, "summary": summary(runs), "runs": runs}, options.output)
            last = runs[-1]
            print(f"{source} seed {seed}: {last['test']['accuracy']:.4f} in {last['seconds']:.0f} s", flush=True)
    print(json.dumps(summary(runs), indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "mps"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--batches", type=int, help="of an epoch, no more than these: a trial, not a result")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--join", nargs="+", type=Path, default=[], help="records to make one of; nothing is trained")
    for name, kind in (
        ("text_length", int),
        ("batch_size", int),
        ("epochs", int),
        ("learning_rate", float),
        ("label_smoothing", float),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="in place of each source's own")
    return parser.parse_args()


def _settings(source: str, options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in SETTINGS[source] if getattr(options, name) is not None}
    trial = {} if options.batches is None else {"batches": options.batches}
    return SETTINGS[source] | given | trial


def train(source: str, seed: int, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return validation and test of one run, on the checkpoint that was best on validation."""
    began = time.perf_counter()
    L.seed_everything(seed, workers=True, verbose=False)
    data = LabelData(
        source=source,
        batch_size=settings["batch_size"],
        val_batch_size=128,
        text_length=settings["text_length"],
        seed=seed,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=options.device == "cuda",
    )
    module = TextClassifier(learning_rate=settings["learning_rate"], label_smoothing=settings["label_smoothing"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(settings, Path(folder), device=options.device)
        trainer.fit(module, datamodule=data)
        epochs = trainer.current_epoch
        best = next(callback for callback in trainer.callbacks if isinstance(callback, RunCheckpoint))  # pyright: ignore[reportAttributeAccessIssue]
        trainer.test(module, datamodule=data, ckpt_path=best.best_model_path, verbose=False, weights_only=True)
        assert module.report is not None
        return {
            "validation_macro_f1": best.best_model_score,
            "test_rows": module.report.rows,
            "test": {name: round(value, 5) for name, value in module.report.figures().items()},
            "epochs": epochs,
            "padded_lengths": data.padded_lengths,
            "texts": {name: data.describe()[name]["texts"] for name in ("train", "validation", "test")},
            "precision": trainer.precision,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
            "seconds": round(time.perf_counter() - began, 1),
        }


def _trainer(settings: dict[str, Any], folder: Path, *, device: str) -> L.Trainer:
    return L.Trainer(
        accelerator=device,
        devices=1,
        strategy=UnifiedStrategy(precision="auto"),
        max_epochs=settings["epochs"],
        limit_train_batches=settings.get("batches"),
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        callbacks=[
            MemoryMonitor(every_n_batches=10),
            GradientHealth(),
            PressureGuard(),
            EarlyStopping(MONITOR, mode="max", patience=3, check_on_train_epoch_end=False),
            RunCheckpoint(folder, every_n_steps=10**6, keep=1, monitor=MONITOR, mode="max"),
        ],
        logger=RunCSVLogger(save_dir=folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def joined(paths: list[Path]) -> dict[str, Any]:
    """Return one record of several that were made at the same time on the same machine.

    Raises:
        SystemExit: If machine or versions differ.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, record in zip(paths, records, strict=True):
        for what in ("machine", "versions"):
            if record[what] != records[0][what]:
                raise SystemExit(f"{path} and {paths[0]} are of different {what}; only runs of one machine are joined.")
    runs = sorted((run for record in records for run in record["runs"]), key=lambda run: (run["source"], run["seed"]))
    command = f"{records[0]['command']} ({len(paths)} processes side by side, --join)"
    return {**records[0], "command": command, "summary": summary(runs), "runs": runs}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean accuracy and intervals by source and settings, and whether the goal is met."""
    found: dict[str, Any] = {}
    for run in runs:
        name = " ".join([run["source"], *(f"{key}={value}" for key, value in run["settings"].items())])
        found.setdefault(name, []).append(run)
    return {name: _summary(own) for name, own in found.items()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    source, rows = runs[0]["source"], runs[0]["test_rows"]
    accuracies = [run["test"]["accuracy"] for run in runs]
    mean = statistics.fmean(accuracies)
    return {
        "seeds": [run["seed"] for run in runs],
        "test_rows": rows,
        "accuracy": round(mean, 4),
        "lowest_and_highest": [round(min(accuracies), 4), round(max(accuracies), 4)],
        "over_seeds_95": _over_seeds(accuracies),
        "wilson_95": [round(end, 4) for end in wilson(mean, rows)],
        "macro_f1": round(statistics.fmean(run["test"]["macro_f1"] for run in runs), 4),
        "tf_idf": TF_IDF.get(source),
        "aim": AIMS[source],
        "met": mean >= AIMS[source],
    }


def _over_seeds(values: list[float]) -> list[float] | None:
    """Return Student's interval of the mean; None for one seed."""
    if not 2 <= len(values) <= len(STUDENT) + 1:
        return None
    mean, half = statistics.fmean(values), STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(max(mean - half, 0.0), 4), round(min(mean + half, 1.0), 4)]


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share that was seen in `count` trials.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    spread = WILSON_Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = WILSON_Z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return middle - half, middle + half


if __name__ == "__main__":
    main()
