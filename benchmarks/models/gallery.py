"""Make the gallery's pictures of CPU runs: GearHead, the classifier and GRPO.

Usage: `python -m benchmarks.models.gallery [gearhead] [classifier] [grpo]`; default: all. GearHead trains on the texts that come with Python.
The classifier and GRPO are the runs of their tutorials, whose notebooks are executed anew (nbclient and ipykernel are needed). Each writes
`gallery_NAME.png` beside this file and its entry in `gallery.json`.
"""

import argparse
import base64
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.records import origin

FOLDER = Path(__file__).parent
RECORD = FOLDER / "gallery.json"
TUTORIALS = FOLDER.parents[1] / "docs" / "tutorials"
GEARHEAD = ("memory=small", "hardware=cpu", "model=gearhead", "data=pydoc", "trainer.max_steps=200")
KEYS = ("model", "parameters", "device", "effective_batch_size", "steps", "seconds", "validation", "peak_bytes")


def gearhead(picture: Path) -> dict[str, Any]:
    """Train GearHead on Python's own documentation; the picture is that of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "lightning_unified", "train", *GEARHEAD, f"run_dir={run}"]
        subprocess.run([*command, "trainer.enable_progress_bar=false"], check=True)
        shutil.copy(run / "plots" / "loss.png", picture)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {"arguments": ["train", *GEARHEAD], **{key: summary[key] for key in KEYS}}


def classifier(picture: Path) -> dict[str, Any]:
    """Execute the classifier's tutorial; draw its confusion matrix and reliability."""
    return _tutorial("02_classifier", picture, shown="validation.png")


def grpo(picture: Path) -> dict[str, Any]:
    """Execute the tutorial of GRPO; the picture shows its rewards."""
    return _tutorial("04_grpo", picture, shown="five digits")


def _tutorial(name: str, picture: Path, *, shown: str) -> dict[str, Any]:
    """Execute a notebook and return what its cells print.

    Store the picture of the cell that holds the text `shown`.
    """
    sys.path.insert(0, str(TUTORIALS))
    from execute import execute  # docs/tutorials/execute.py

    cells = [cell for cell in execute(TUTORIALS / f"{name}.ipynb")["cells"] if cell["cell_type"] == "code"]
    images = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell["outputs"]
        if shown in "".join(cell["source"]) and "image/png" in output.get("data", {})
    ]
    picture.write_bytes(base64.b64decode("".join(images[0])))
    printed = [
        "".join(output["text"]) for cell in cells for output in cell["outputs"] if output.get("name") == "stdout"
    ]
    return {"tutorial": f"docs/tutorials/{name}.ipynb", "printed": "".join(printed).splitlines()}


def main() -> int:
    """Make the named pictures and write the record."""
    makers = {maker.__name__: maker for maker in (gearhead, classifier, grpo)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    for name in parser.parse_args().names or makers:
        found = makers[name](FOLDER / f"gallery_{name}.png")
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        record[name] = {"origin": origin(f"python -m benchmarks.models.gallery {name}"), **found}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: gallery_{name}.png", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
