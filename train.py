"""Compose -> build -> fit: `python train.py memory=large hardware=mps`.

`--help` lists groups and keys.
"""

import sys
from pathlib import Path

from lightning_unified.cli.train import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], config_path=str(Path(__file__).resolve().parent / "conf"), program=sys.argv[0]))
