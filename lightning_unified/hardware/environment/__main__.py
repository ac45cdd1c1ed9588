"""Print pip's arguments for the build of torch that fits this machine.

Run it with `python -m lightning_unified.hardware.environment`. Needs no installed package, so `make train` runs it before it installs
torch. The arguments go to standard output, the reason to standard error.
"""

import argparse
import sys
from collections.abc import Sequence

from lightning_unified.hardware.environment.builds import read_machine
from lightning_unified.hardware.environment.torch_builds import builds_for, choose_build, pip_arguments
from lightning_unified.hardware.sources import Sources


def main(arguments: Sequence[str] | None = None, *, sources: Sources | None = None) -> int:
    """Print the arguments; return 2 if no build uses the machine's GPU as it is set up now."""
    machine = read_machine(sources or Sources.without_torch())
    parser = argparse.ArgumentParser(prog="python -m lightning_unified.hardware.environment", description=__doc__)
    parser.add_argument("--release", default="", help="release of torch, such as 2.13.0; default: any")
    parser.add_argument(
        "--build", choices=["auto", *builds_for(machine)], default="auto", help="default: the one that fits"
    )
    asked = parser.parse_args(arguments)
    choice = choose_build(machine)
    build = choice.build if asked.build == "auto" else asked.build
    if build is None:
        way_out = " To train on the CPU instead: TORCH=cpu." if choice.runs_on_cpu else ""
        sys.stderr.write(f"no build of torch fits this machine: {choice.reason}{way_out}\n")
        return 2
    sys.stderr.write(f"torch's build: {build} ({choice.reason if asked.build == 'auto' else 'as asked'})\n")
    # requirements.lock holds all packages that the CPU build needs, so its index serves torch only.
    print(*pip_arguments(build, asked.release, platform=machine.platform), *(["--no-deps"] if build == "cpu" else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
