"""`python -m lightning_unified`."""

import sys

from lightning_unified.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
