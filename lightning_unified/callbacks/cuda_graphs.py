"""Parts of a module whose training passes are replayed as CUDA graphs, for as long as a fit trains."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.cuda_graphs import RecordedCalls

__all__ = ["CudaGraphs"]

log = logging.getLogger("lightning_unified")


class CudaGraphs(Callback):
    """Record the forward and backward passes of parts of the module as CUDA graphs, one pair for each shape of their inputs.

    For small models, whose steps last as long as the host takes to tell the device about them. Results are those of the same run
    without it. What `training_step` does outside these parts (the loss, logging) runs as ever, and so do validation, the
    optimizer, recovery from memory that runs out, and shapes that are new; `RecordedCalls` says when else a call runs
    eagerly. Data in a few fixed shapes is what this is for: `data.padded_lengths` for texts, whole batches (`drop_last`) for the rest.

    Costs as much memory as the trained parameters, which a plan of the "unified" strategies counts. The memory of recorded
    activations is reserved for as long as they are recorded: `torch.cuda.max_memory_reserved` shows it, and
    `max_memory_allocated` does not.

    Anywhere but on CUDA it does nothing, and says so in the log.

    Args:
        of: Names of the parts, as in `module.get_submodule`: `"network"`, or several. None takes the module's direct children that hold
            trained parameters.
        most: Shapes of a part that are recorded.

    Raises:
        ConfigurationError: If `most` is less than 1.
    """

    def __init__(self, *, of: str | Sequence[str] | None = None, most: int = 16) -> None:
        if most < 1:
            raise ConfigurationError(f"CudaGraphs: most={most} must be 1 or more.")
        self.of = [of] if isinstance(of, str) else None if of is None else [str(name) for name in of]
        self.most = most
        self._parts: dict[str, RecordedCalls] = {}
        self._gradients: list[list[Tensor]] = []  # tensors of a callback are counted by plans

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps: the options. Its modules run eagerly."""
        return {**vars(self), "_parts": {}, "_gradients": []}

    @property
    def recorded(self) -> dict[str, int]:
        """How many shapes of each part are recorded now."""
        return {name: part.recorded for name, part in self._parts.items()}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stand in for the calls of the parts.

        Raises:
            ConfigurationError: If a part is named that there is not, that is not trained, or that is compiled.
        """
        self._take_off()
        parts = dict(_trained_children(pl_module) if self.of is None else _named(pl_module, self.of))
        if pl_module.device.type != "cuda":
            log.info("CudaGraphs does nothing on %s.", pl_module.device.type)
            return
        if not parts:
            log.warning("CudaGraphs: no direct child of %s holds trained parameters.", type(pl_module).__name__)
        for name, part in parts.items():
            try:
                self._parts[name] = RecordedCalls(part, most=self.most)
            except ValueError as error:
                self._take_off()
                raise ConfigurationError(f"CudaGraphs, {name}: {error}") from error
        self._gradients = [part.gradients for part in self._parts.values()]

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Have an optimizer make its state beside the weights, before its first step: among gradients, in what activations have left, it
        would hold memory for good that no recording could have.
        """
        if self._parts and not optimizer.state:
            for part in self._parts.values():
                part.gather()
            torch.cuda.empty_cache()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._parts:
            told = ", ".join(f"{count} shapes of {name}" for name, count in self.recorded.items())
            log.info("CudaGraphs: %s were recorded at the end.", told)
        self._take_off()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._take_off()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._take_off()

    def _take_off(self) -> None:
        for part in self._parts.values():
            part.remove()
        self._parts, self._gradients = {}, []


def _named(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    known = {name: part for name, part in module.named_modules() if name}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(list(known)[:8])}."
            raise ConfigurationError(f"CudaGraphs: of={name!r} is no part of {type(module).__name__}; {hint}")
        yield name, known[name]


def _trained_children(module: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children that are called and trained; of lists and dicts of modules, which are not called, those in them."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _trained_children(child, prefix=f"{prefix}{name}.")
        elif any(one.requires_grad for one in child.parameters()):
            yield f"{prefix}{name}", child
