"""Describe a data source, or measure what n-gram models score on it.

Usage: `python -m lightning_unified.data describe|baselines`.
"""

import argparse
import json
import math
import sys

from lightning_unified.data.datamodule import TextData
from lightning_unified.data.sources.corpora import SOURCES

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0, or 2 if a source or an argument is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lightning_unified.data", description=__doc__)
    parser.add_argument(
        "command",
        choices=["describe", "baselines"],
        help="print counts, or train n-gram models and print their perplexity",
    )
    parser.add_argument("--source", default="pydoc", help=f"one of {', '.join(SOURCES)}")
    parser.add_argument("--path", help="for --source files: a .jsonl or .txt file, or a folder of them")
    parser.add_argument("--vocab-size", type=int, default=2048, help="entries of the vocabulary")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch")
    parser.add_argument("--loss-on", default="all", help="all or answer")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="share of the documents for validation")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the order")
    parser.add_argument("--max-groups", type=int, help="number of topics, services, files or families of codes to use")
    asked = vars(parser.parse_args(arguments))
    command = asked.pop("command")
    try:
        data = TextData(**asked)
        report = data.describe() if command == "describe" else _baselines(data)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0


def _baselines(data: TextData) -> dict[str, float]:
    """Return perplexities per token, and bits per byte.

    Bits per byte can be compared between vocabularies.
    """
    validation = data.describe()["validation"]
    report: dict[str, float] = {"vocabulary": data.vocab_size, "scored_tokens": validation["scored_tokens"]}
    for name, value in data.baselines().items():
        report[f"{name}_perplexity"] = round(value, 2)
        if data.loss_on == "all":
            report[f"{name}_bits_per_byte"] = round(
                validation["scored_tokens"] * math.log2(value) / validation["bytes"], 4
            )
    return report


if __name__ == "__main__":
    sys.exit(main())
