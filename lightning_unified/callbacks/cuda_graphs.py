"""`CudaGraphs`: replay the training passes of submodules as CUDA graphs during a fit."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, check_count
from lightning_unified.nn.cuda_graphs import RecordedCalls

__all__ = ["CudaGraphs"]

log = logging.getLogger("lightning_unified")


class CudaGraphs(Callback):
    """Record forward and backward passes of submodules as CUDA graphs.

    Each shape of their inputs has one pair. This helps small models, whose steps are limited by the host's kernel launches. Results
    equal those of the same run without it. Code of `training_step` outside these submodules (the loss, logging) runs eagerly, and
    so do validation, the optimizer, recovery and new shapes. `RecordedCalls` lists the other eager cases. Data should have few
    fixed shapes: `data.padded_lengths` for texts, whole batches (`drop_last`) otherwise.

    Recorded activations stay reserved: `torch.cuda.max_memory_reserved` includes them, `max_memory_allocated` does not. Plans of the
    "unified" strategies count no launches of a recorded submodule's operations, so that small micro-batches cost less time.

    Compiled parts of a submodule are recorded too. So are checkpointed blocks, unless the submodule draws random numbers.

    On other devices than CUDA the callback does nothing and logs that.

    Args:
        of: Names of submodules, as in `module.get_submodule`: one or several. None takes the module's direct children that hold
            trained parameters.
        most: The largest number of recorded shapes per submodule.

    Raises:
        ConfigurationError: If `most` is less than 1.
    """

    def __init__(self, *, of: str | Sequence[str] | None = None, most: int = 16) -> None:
        check_count("CudaGraphs: most", most)
        if not isinstance(of, (str, Sequence, type(None))):
            raise ConfigurationError(f"CudaGraphs: of={of!r}: give a submodule's name, a list of names, or None.")
        self.of = [of] if isinstance(of, str) else None if of is None else [str(name) for name in of]
        self.most = most
        self._parts: dict[str, RecordedCalls] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy in another process: the options. Its modules run eagerly."""
        return {**vars(self), "_parts": {}}

    @property
    def recorded(self) -> dict[str, int]:
        """The number of recorded shapes of each submodule."""
        return {name: part.recorded for name, part in self._parts.items()}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the forward calls of the submodules by recorded ones.

        Raises:
            ConfigurationError: If a named submodule does not exist, is not trained, or is compiled.
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

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gather gradients and free cached blocks before the optimizer creates its state.

        Otherwise the state would keep blocks between gradients, left by activations, which recordings could then never use.
        """
        if self._parts and not optimizer.state:
            for part in self._parts.values():
                part.gather()
            torch.cuda.empty_cache()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._parts:
            counts = ", ".join(f"{count} shapes of {name}" for name, count in self.recorded.items())
            log.info("CudaGraphs: %s were recorded at the end.", counts)
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
        self._parts = {}


def _named(module: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    known = {name: part for name, part in module.named_modules() if name}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(list(known)[:8])}."
            raise ConfigurationError(f"CudaGraphs: of={name!r} is no part of {type(module).__name__}; {hint}")
        yield name, known[name]


def _trained_children(module: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the trained children.

    A ModuleList or ModuleDict is never called, so its members are yielded instead.
    """
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _trained_children(child, prefix=f"{prefix}{name}.")
        elif any(one.requires_grad for one in child.parameters()):
            yield f"{prefix}{name}", child
