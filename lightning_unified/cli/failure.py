"""Failures on the command line: a dozen lines on standard error and an exit code.

No traceback is shown.
"""

import os
import sys
import traceback

from lightning_unified.cli.config.bounded_files import printable
from lightning_unified.cli.config.extras import extra_for, missing_packages
from lightning_unified.errors import ConfigurationError, LightningUnifiedError

__all__ = [
    "DEBUG_VARIABLE",
    "INTERRUPTED",
    "TERMINATED",
    "exit_code_of",
    "explain",
    "report_failure",
    "report_interrupt",
]

DEBUG_VARIABLE = "LIGHTNING_UNIFIED_DEBUG"
TERMINATED = 128 + 15
INTERRUPTED = 128 + 2
_MOST_LINES = 10
_LONGEST_LINE = 400


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for `error`."""
    if isinstance(error, LightningUnifiedError):
        return error.exit_code, str(error)
    if type(error).__module__.startswith("omegaconf."):  # a key that an override removed, or that another key refers to
        key, first = getattr(error, "full_key", None), str(error).splitlines()[0]
        text = f"{key}: {first}; see python train.py --cfg job." if key else first
        return ConfigurationError.exit_code, text
    for package in missing_packages(error):
        if extra := extra_for(package):
            needed = f"the package {package} is not installed: pip install 'lightning-unified[{extra}]'."
            return ConfigurationError.exit_code, str(error) if "pip install" in str(error) else needed
    return 1, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for `error`, which another process prints."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else explain(error)[0]


def report_failure(error: BaseException) -> int:
    """Print `error` to standard error and return its exit code.

    `LIGHTNING_UNIFIED_DEBUG=1` adds the traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        return report_interrupt()
    code, text = explain(error)
    if os.environ.get(DEBUG_VARIABLE, "0") not in {"", "0"}:
        traceback.print_exception(error)
    lines = [
        line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"
        for line in printable(text).strip().splitlines()
    ]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"… {len(lines) - _MOST_LINES + 1} more lines"]
    if not isinstance(error, LightningUnifiedError) and code != ConfigurationError.exit_code:
        lines.append(f"{DEBUG_VARIABLE}=1 shows the traceback.")
    prefix = "error" if code != 2 else "this cannot be run"
    sys.stderr.write(f"{prefix}: " + "\n  ".join(lines) + "\n")
    sys.stderr.flush()
    return code


def report_interrupt(kept: str = "") -> int:
    """Print that Ctrl-C ended the command, and return the exit code.

    The line goes to standard error. `kept` says which files remain.
    """
    sys.stderr.write(f"\ninterrupted: {kept or 'nothing was saved'}\n")
    sys.stderr.flush()
    return INTERRUPTED
