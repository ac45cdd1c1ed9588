"""Memory of loading and saving weights, page cache included, beside other ways.

Each way runs in a process of its own, in a control group that counts every page from then on. Peaks are shares of the weights' bytes;
`limited` tells whether it ends within 1.15 times the weights. Saving begins with the weights in memory.

Usage: python -m benchmarks.weight_files.memory [--mib 1024]
       (writes benchmarks/weight_files/memory.json; some minutes; Linux, with the right to make a control group)
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.records import markdown, origin, prepare, write
from benchmarks.weight_files.cgroup import missing
from benchmarks.weight_files.one import WAYS

RESULTS = Path(__file__).with_suffix(".json")
SLACK = 0.15  # of the weights


def run(way: str, mib: int, *options: str) -> dict[str, Any] | None:
    """Return what `one` reports; None if the kernel killed it."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.weight_files.one", way, str(mib), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode < 0 or done.returncode == 137:
        return None
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(way: str, mib: int) -> dict[str, Any]:
    """Return the peak of one way without a limit, and how it ends within `SLACK`."""
    free, limited = run(way, mib), run(way, mib, "--slack", str(int(SLACK * mib)))
    assert free is not None
    ended = "killed" if limited is None else "yes" if not limited["limit_met"] else "yes, by reclaiming pages"
    return {
        "way": way,
        "peak": round(free["peak"] / free["bytes"], 3),
        "seconds": free["seconds"],
        "limited": ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if why := missing():
        parser.error(why)
    prepare("weight-files")
    runs = [measured(way, arguments.mib) for way in WAYS]
    print(markdown({run["way"]: run for run in runs}, first="way"))
    about = origin("python -m benchmarks.weight_files.memory")
    about["versions"] |= {"safetensors": version("safetensors")}
    about["machine"]["kernel"] = os.uname().release
    write({**about, "weights_bytes": arguments.mib * 2**20, "runs": runs}, arguments.output)


if __name__ == "__main__":
    main()
