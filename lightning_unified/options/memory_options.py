"""The user's memory options of a run, validated once."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.options.attention import AskedAttention, check_attention
from lightning_unified.options.compilation import AskedCompile
from lightning_unified.options.loss_chunk import AskedChunk, check_chunk
from lightning_unified.options.optimizer_kernel import KERNELS

__all__ = ["AskedKernel", "MemoryOptions"]

AskedKernel = Literal["keep", "auto", "fused", "foreach", "for-loop"]

_ASKED_COMPILE = ("auto", "blocks", "whole", False)
_ASKED_KERNELS = ("keep", "auto", *KERNELS)
_IMPOSSIBLE_KERNELS = {
    "in-backward": "it writes weights while gradients are still being made, so that a step that runs out of memory could not be "
    "repeated, gradients could be neither clipped nor accumulated, and a batch could not be split",
    "8-bit": "it is another optimizer and learns something else; return one from configure_optimizers, such as torchao's AdamW8bit",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """The keyword arguments shared by the strategies and `conf/memory`.

    The strategies are `UnifiedStrategy`, which documents each argument, and `UnifiedDDPStrategy`. Two arguments are checked later, because
    the check needs the machine: `budget` when the device is known, `precision` when the Trainer's own flag is known.

    Raises:
        ConfigurationError: If a value is not allowed.
    """

    budget: str | int = "auto"
    micro_batch_size: int | Literal["auto"] = "auto"
    recompute: bool | Literal["auto"] = "auto"
    compile: AskedCompile = False
    precision: str = "trainer"
    optimizer_kernel: AskedKernel = "keep"
    loss_chunk: AskedChunk = "auto"
    attention: AskedAttention = "auto"
    predict: bool = True
    recover: bool = True
    optimizer_rollback: bool = False
    micro_batches: MicroBatchRules | None = None
    batch_norm: Literal["refuse", "micro"] = "refuse"
    check_split: bool = True
    detect_faults: bool = True
    evaluation_micro_batch_size: int | Literal["auto"] = "auto"
    window_mean: Literal["batches", "terms"] = "batches"
    remember: str | None = None
    simulate: str | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "evaluation_micro_batch_size"):
            _check_rows(name, getattr(self, name))
        for name in ("predict", "recover", "optimizer_rollback", "check_split", "detect_faults"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give true or false.")
        if self.recompute != "auto" and not isinstance(self.recompute, bool):
            raise ConfigurationError(f'recompute={self.recompute!r}: give true, false or "auto".')
        if (isinstance(self.compile, int) and self.compile is not False) or self.compile not in _ASKED_COMPILE:
            raise ConfigurationError(
                f'compile={self.compile!r}: give "auto", "blocks" (the repeated blocks), "whole" (the module\'s children) or false.'
            )
        _check_kernel(self.optimizer_kernel)
        check_chunk(self.loss_chunk)
        check_attention(self.attention)
        if self.batch_norm not in ("refuse", "micro"):
            raise ConfigurationError(f'batch_norm={self.batch_norm!r}: give "refuse" or "micro".')
        if self.window_mean not in ("batches", "terms"):
            raise ConfigurationError(f'window_mean={self.window_mean!r}: give "batches" or "terms".')
        if self.micro_batches is not None and not isinstance(self.micro_batches, MicroBatchRules):
            raise ConfigurationError(
                f"micro_batches={self.micro_batches!r}: give MicroBatchRules(...) from lightning_unified."
            )
        _check_file("remember", self.remember)


def _check_rows(name: str, given: Any) -> None:
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ConfigurationError(f'{name}={given!r}: give a number of rows (1, 2, 3, …) or "auto".')


def _check_file(name: str, given: Any) -> None:
    if given is not None and (not isinstance(given, (str, os.PathLike)) or not str(given) or Path(given).is_dir()):
        raise ConfigurationError(f"{name}={given!r}: give the path of a file, as in runs/mine/sizes.json, or None.")


def _check_kernel(given: str) -> None:
    if given in _IMPOSSIBLE_KERNELS:
        raise ConfigurationError(f'optimizer_kernel="{given}" is not offered: {_IMPOSSIBLE_KERNELS[given]}.')
    if given not in _ASKED_KERNELS:
        near = difflib.get_close_matches(str(given), [*_ASKED_KERNELS, *_IMPOSSIBLE_KERNELS], n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise ConfigurationError(
            f"optimizer_kernel={given!r} is not offered;{hint} choose from {', '.join(_ASKED_KERNELS)}."
        )
