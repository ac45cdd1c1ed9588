"""`consolidate`: write a distributed checkpoint as one file, which `torch.load` reads."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_unified.cli.config.trust import FLAG
from lightning_unified.cli.failure import report_failure
from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.units import format_bytes

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Write the file, and return 0; 2 for an invalid request, 1 for a checkpoint that fails."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as done:
        return int(done.code or 0)
    try:
        folder = Path(arguments.checkpoint).expanduser()
        output = arguments.output or folder.with_name(f"{folder.stem}.consolidated{folder.suffix}")
        _check(folder, output)
        from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO

        io = AtomicCheckpointIO()
        try:
            checkpoint = io.load_checkpoint(folder, weights_only=not arguments.trust)
        except CheckpointError as error:
            raise CheckpointError(
                str(error).replace("pass weights_only=False to fit or validate", f"add {FLAG}")
            ) from error
        io.save_checkpoint(checkpoint, output)
        sys.stdout.write(f"{output} ({format_bytes(output.stat().st_size)})\n")
    except (CheckpointError, ConfigurationError) as error:
        return report_failure(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_unified consolidate", description=__doc__)
    parser.add_argument("checkpoint", metavar="DIR", help="the folder that the ranks of unified_fsdp have saved")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="a file that is not there yet (default: NAME.consolidated.ckpt beside DIR)",
    )
    parser.add_argument(
        FLAG, action="store_true", help="read Python objects beside tensors and plain data, which may run code"
    )
    return parser


def _check(folder: Path, output: Path) -> None:
    if not folder.is_dir():
        found = "is a file, which is one already" if folder.exists() else "is not there"
        raise ConfigurationError(f"{folder} {found}; give the folder of a distributed checkpoint.")
    if output.exists():
        raise ConfigurationError(f"--output {output} is there already; give another name, or move it away.")
