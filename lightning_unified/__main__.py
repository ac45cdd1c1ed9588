"""`python -m lightning_unified`."""

import gc
import sys

from lightning_unified.cli.main import main

__all__ = ["run"]


def run() -> int:
    """Run a command; run `plan` without the garbage collector, to the end of the process.

    The traces of a plan are a million objects. A collection visits all of them, and finds little before the process ends.
    """
    if sys.argv[1:2] != ["plan"]:
        return main()
    gc.disable()
    code = main()
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
