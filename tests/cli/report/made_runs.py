"""Directories of made-up runs, and the page about them as a tree."""

import json
from html.parser import HTMLParser

from lightning_unified.cli.report.html.page import page
from lightning_unified.cli.report.run_directory.read import read_run

GIB, MIB = 2**30, 2**20


VOID = {"meta", "br", "link", "input"}
SUMMARY = {
    "model": "gearhead",
    "device": "cuda:0",
    "pool": "dedicated",
    "budget_bytes": 4 * GIB,
    "effective_batch_size": 64,
    "micro_batch_size": 8,
    "steps": 40,
    "peak_bytes": {"predicted": None, "measured": 2 * GIB, "source": "max_memory_allocated"},
    "recoveries": 1,
    "validation": {"loss": 4.75},
    "versions": {"torch": "2.13.0", "numpy": None},
}
PLAN = {
    "micro_batch_size": 8,
    "precision": "bf16-mixed",
    "budget_bytes": 4 * GIB,
    "reasons": {"micro_batch_size": "the largest that fits", "precision": "native"},
    "prediction": {
        "peak_bytes": int(1.9 * GIB),
        "reserved_bytes": int(2.2 * GIB),
        "categories": {"weights": GIB, "optimizer state": int(0.9 * GIB), "buffers": 0},
        "confidence": "high",
        "instant": "backward of blocks.3",
        "instants": [["forward of blocks.0", GIB], ["backward of blocks.3", int(1.9 * GIB)]],
        "notes": ["attention without a flash kernel"],
    },
    "alternatives": [
        {"micro_batch_size": 8, "precision": "bf16-mixed", "peak_bytes": int(1.9 * GIB), "seconds": 0.5, "fits": True},
        {"micro_batch_size": 64, "precision": "bf16-mixed", "peak_bytes": 9 * GIB, "seconds": 0.4, "fits": False},
    ],
}
METRICS = """\
step,epoch,memory/allocated,memory/micro_batch_size,memory/peak,speed/samples_per_second,train/loss,val/loss
9,0,1000000000,16,1500000000,20.5,5.5,
19,0,1100000000,8,1600000000,21.5,5.0,
19,0,,,,,,4.9
39,0,1100000000,8,1600000000,21.5,4.8,4.75
"""


def line(kind, step, text="", **more):
    return json.dumps({"time": f"2026-01-01T00:00:{step:02d}+00:00", "step": step, "kind": kind, "text": text, **more})


JOURNAL = [
    line(
        "began",
        0,
        "GearHead begins",
        recoveries=0,
        budget_bytes=4 * GIB,
        machine={"name": "H200", "low_bytes": 3 * GIB},
    ),
    line("event", 11, "out of memory in forward with 16 rows at once; repeated with 8 at once", recoveries=1),
    line("ended", 40, "ended after step 40", recoveries=1, budget_bytes=4 * GIB),
]


def make(folder, *, config="trainer: {max_steps: 40}\nmemory: {budget: 4GiB}\n", **files):
    """Make a run directory; a file given as None is left out."""
    content = {
        "summary.json": json.dumps(SUMMARY),
        "plan.json": json.dumps(PLAN),
        "metrics.csv": METRICS,
        "events.jsonl": "\n".join(JOURNAL) + "\n",
        "config.yaml": config,
    } | {name.replace("__", "."): text for name, text in files.items()}
    folder.mkdir(parents=True)
    for name, text in content.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def run_of(folder, **files):
    return read_run(make(folder, **files), name=folder.name)


class Tree(HTMLParser):
    """Reads a page and fails where a tag is not closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read_page(*runs):
    text = page(runs)
    tree = Tree(text)
    assert tree.open == []
    return text, tree
