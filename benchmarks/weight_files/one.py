"""Load or save weights once, and report the process's peak, page cache included.

Usage: python -m benchmarks.weight_files.one WAY MIB [--slack MIB]
       (prints one line of JSON; with --slack the process may take the weights and so much more, or is killed)
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.weight_files.cgroup import entered, remove
from lightning_unified import AtomicCheckpointIO, UnifiedStrategy
from lightning_unified.models.plain_checkpoint import load_weights as load_plain
from lightning_unified.models.plain_checkpoint import read_plain
from lightning_unified.models.pretrained.streaming import load_weights, without_values

__all__ = ["WAYS"]

MIB = 2**20
_WIDTH = 1024


class Stack(L.LightningModule):
    """Square layers of 4 MiB, and an embedding of a quarter of all weights."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(mib // 4 * MIB // 4 // _WIDTH, _WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range((mib - mib // 4) // 4))

    def trained(self) -> None:
        """Write every weight, as the first optimizer step does."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def _built(mib: int) -> Stack:
    with torch.device("meta"):
        stack = Stack(mib)
    return stack.to_empty(device="cpu")


def pretrained(file: Path, mib: int) -> None:
    """`load_weights`, as the models read safetensors."""
    with without_values():
        stack = Stack(mib)
    assert not load_weights(stack, file.parent, dtype=torch.float32)
    stack.trained()


def pretrained_in_half(file: Path, mib: int) -> None:
    """`load_weights` into half the bytes."""
    with without_values():
        stack = Stack(mib)
    assert not load_weights(stack, file.parent, dtype=torch.bfloat16)
    stack.trained()


def safetensors_mapped(file: Path, mib: int) -> None:
    """safetensors' own reader: the parameters are views of the file."""
    with torch.device("meta"):
        stack = Stack(mib)
    stack.load_state_dict(load_file(file), assign=True)
    stack.trained()


def safetensors_copied(file: Path, mib: int) -> None:
    """safetensors' own reader, and its tensors copied into a module."""
    stack = _built(mib)
    stack.load_state_dict(load_file(file))
    stack.trained()


def inference(file: Path, mib: int) -> None:
    """`read_plain` and `load_weights`, as the models' commands read checkpoints."""
    stack = _built(mib)
    load_plain(stack, read_plain(file)["state_dict"], path=file)
    stack.trained()


def resume(file: Path, mib: int) -> None:
    """`Trainer(strategy="unified")` with a checkpoint: model and optimizer state."""
    _resumed(mib, UnifiedStrategy(), AtomicCheckpointIO(), file)


def resume_lightning(file: Path, mib: int) -> None:
    """Lightning's own strategy and IO with the same checkpoint."""
    _resumed(mib, SingleDeviceStrategy(device="cpu"), TorchCheckpointIO(), file)


def _resumed(mib: int, strategy: Strategy, io: TorchCheckpointIO, file: Path) -> None:
    stack = _built(mib // 2)
    strategy._lightning_module, strategy.checkpoint_io = stack, io
    strategy.optimizers = [stack.configure_optimizers()]
    checkpoint = strategy.load_checkpoint(file)
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)
    del checkpoint
    stack.trained()
    for state in strategy.optimizers[0].state.values():
        state["momentum_buffer"].mul_(1.5)


def save(file: Path, mib: int) -> None:
    """`AtomicCheckpointIO`, as the unified strategies save."""
    AtomicCheckpointIO().save_checkpoint({"state_dict": _filled(mib)}, file)


def save_lightning(file: Path, mib: int) -> None:
    """Lightning's own IO."""
    TorchCheckpointIO().save_checkpoint({"state_dict": _filled(mib)}, file)


def save_torch(file: Path, mib: int) -> None:
    """`torch.save` into a file."""
    torch.save({"state_dict": _filled(mib)}, file)


def _filled(mib: int) -> dict[str, torch.Tensor]:
    stack = _built(mib)
    for parameter in stack.parameters():
        parameter.data.fill_(1.5)
    return stack.state_dict()


WAYS: MappingProxyType[str, tuple[Callable[[Path, int], None], str]] = MappingProxyType(
    {
        "pretrained": (pretrained, "weights.safetensors"),
        "pretrained in half": (pretrained_in_half, "weights.safetensors"),
        "safetensors, mapped": (safetensors_mapped, "weights.safetensors"),
        "safetensors, copied": (safetensors_copied, "weights.safetensors"),
        "inference": (inference, "weights.ckpt"),
        "resume": (resume, "state.ckpt"),
        "resume, Lightning": (resume_lightning, "state.ckpt"),
        "save": (save, "saved.ckpt"),
        "save, Lightning": (save_lightning, "saved.ckpt"),
        "save, torch": (save_torch, "saved.ckpt"),
    }
)
"""What is measured: a function of a file and the MiB of its tensors, and the file's name."""


def _write(file: Path, mib: int) -> None:
    """Write the file that a way reads, and leave none of it in the page cache."""
    if file.suffix == ".safetensors":
        save_file(_filled(mib), file)
    elif file.name == "state.ckpt":
        stack = _built(mib // 2)
        stack.load_state_dict(_filled(mib // 2))
        optimizer = stack.configure_optimizers()
        for parameter in stack.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        torch.save({"state_dict": stack.state_dict(), "optimizer_states": [optimizer.state_dict()]}, file)
    elif file.name == "weights.ckpt":
        torch.save({"state_dict": _filled(mib)}, file)
    if file.exists():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("mib", type=int)
    parser.add_argument("--slack", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = WAYS[arguments.way][1]
    size = arguments.mib * MIB
    limit = None if arguments.slack is None else size + arguments.slack * MIB
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        file = Path(folder) / name
        code = _forked(lambda: _write(file, arguments.mib))  # its memory is not that of the process that loads
        code = code or _forked(lambda: _report(arguments.way, file, arguments.mib, limit))
    sys.exit(code)


def _report(way: str, file: Path, mib: int, limit: int | None) -> None:
    """Run one way in a control group, and print what it took."""
    with entered(limit) as group:
        began = time.perf_counter()
        WAYS[way][0](file, mib)
        seconds = time.perf_counter() - began
        found = {"peak": group.peak, "limit_met": group.limit_met}
    print(json.dumps({"way": way, "bytes": mib * MIB, **found, "seconds": round(seconds, 2)}), flush=True)


def _forked(run: Callable[[], None]) -> int:
    """Run in a child, and return its exit code, 137 if it was killed.

    The control group of a killed child is removed.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    remove(child)
    return code if code >= 0 else 137


if __name__ == "__main__":
    main()
