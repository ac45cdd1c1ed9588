"""Lets the tests beside this import what they share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
