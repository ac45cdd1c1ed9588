"""Apply the optimizer kernel, loss chunk and attention that the user or a plan chose."""

import logging
from collections.abc import Iterable
from typing import Any, Literal

import lightning as L
from torch.optim import Optimizer

from lightning_unified.errors import ConfigurationError
from lightning_unified.options.attention import AskedAttention, AttentionOption, attention_choices
from lightning_unified.options.loss_chunk import AskedChunk, LossChunk, chunk_choices
from lightning_unified.options.memory_options import AskedKernel
from lightning_unified.options.optimizer_kernel import (
    KERNELS,
    Kernel,
    KernelChange,
    allowed_kernels,
    asks_for_kernel,
    kernel_of,
    set_kernel,
)

__all__ = ["AppliedOptions"]

log = logging.getLogger("lightning_unified")


class AppliedOptions:
    """The optimizer kernel, the loss chunk and the attention of one run, undone when it ends.

    `ActivationCheckpointing` does the same for recomputed blocks.

    Args:
        optimizer_kernel: `"keep"` leaves optimizers as they were built. A kernel's name sets it from the first step on, for all
            optimizers. `"auto"` lets a plan choose, for optimizers that were built without a choice.
        loss_chunk: `"auto"` lets a plan choose, False leaves the module as it is, and a number of rows sets it from the first step on.
        attention: `"auto"` lets a plan choose, `"torch"` leaves attention as it is, and `"chunked"` sets it from the first step on.

    Attributes:
        loss_chunk: Rows of logits that exist at one time; None where it was not set.
    """

    def __init__(
        self,
        *,
        optimizer_kernel: AskedKernel = "keep",
        loss_chunk: AskedChunk = "auto",
        attention: AskedAttention = "auto",
    ) -> None:
        self._asked: AskedKernel = optimizer_kernel
        self._asked_chunk: AskedChunk = loss_chunk
        self._asked_attention: AskedAttention = attention
        self._attention: AttentionOption | None = None
        self._module: L.LightningModule | None = None
        self._optimizers: list[Optimizer] = []
        self._changes: list[KernelChange] = []
        self._chunk: LossChunk | None = None
        self.loss_chunk: int | None = None
        self._why = {"optimizer_kernel": "as built", "loss_chunk": "as the module is", "attention": "torch's"}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: the choice, without module and optimizers."""
        return {**vars(self), "_module": None, "_optimizers": [], "_changes": [], "_chunk": None, "_attention": None}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each option that was set, for `Plan.reasons`."""
        touched = {
            "optimizer_kernel": bool(self._changes),
            "loss_chunk": self._chunk is not None,
            "attention": self._attention is not None,
        }
        return {name: why for name, why in self._why.items() if touched[name]}

    @property
    def optimizer_kernel(self) -> Kernel | Literal["other"] | None:
        """The kernel that runs.

        It is `"other"` if optimizers differ or are not torch's own, and None before there are any.
        """
        kernels: set[Kernel | Literal["other"]] = {kernel_of(optimizer) for optimizer in self._optimizers}
        return (kernels.pop() if len(kernels) == 1 else "other") if kernels else None

    def begin(self, module: L.LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Begin a fit of `module` with the user's settings.

        Raises:
            ConfigurationError: If an optimizer cannot run with the user's kernel, or the module has no loss chunk to set.
        """
        self.end()
        self._module, self._optimizers = module, list(optimizers)
        if self._optimizers and self._asked_chunk not in ("auto", False):
            self.set_loss_chunk(int(self._asked_chunk), why="as asked")
        if self._optimizers and self._asked_attention == "chunked":
            self.set_attention("chunked", why="as asked")
        if self._asked in KERNELS:
            for optimizer in self._optimizers:
                self._changes.append(set_kernel(optimizer, self._asked))  # pyright: ignore[reportArgumentType]
            self._why["optimizer_kernel"] = f"{self._asked}, as asked"

    def kernel_choices(self, device: str | None = None, *, scaled: bool = False) -> tuple[Kernel, ...]:
        """Return the kernels that a plan may set.

        Under `"auto"`, these are the kernels that every optimizer built without a choice allows. Otherwise there are none.

        Args:
            device: The type of device the run is planned for; by default that of the parameters.
            scaled: Whether a gradient scaler is in use.
        """
        free = self._free()
        sparse = self._module is not None and any(
            getattr(child, "sparse", False) is True for child in self._module.modules()
        )
        allowed = [allowed_kernels(optimizer, device, scaled=scaled) for optimizer in free]
        return tuple(
            kernel
            for kernel in KERNELS
            if free and all(kernel in each for each in allowed) and not (sparse and kernel == "fused")
        )

    def chunk_choices(self) -> tuple[int | None, ...]:
        """Return the loss chunks that a plan may set; only None if the module offers none."""
        return (None,) if self._module is None else chunk_choices(self._module, self._asked_chunk)

    def attention_choices(self, backend: str) -> tuple[Literal["chunked"] | None, ...]:
        """Return the kinds of attention that a plan may set on a backend; None is torch's."""
        if self._attention is not None:
            return ("chunked",)
        return (
            (None,) if self._module is None else attention_choices(self._module, self._asked_attention, backend=backend)
        )

    @property
    def attention(self) -> Literal["chunked"] | None:
        """The attention of the run; None for torch's."""
        return None if self._attention is None else "chunked"

    def set_kernel(self, kernel: Kernel, *, why: str) -> None:
        """Make every optimizer built without a choice run with `kernel`, from its next step on.

        The kernel is one of `kernel_choices`; `why` is the reason, for people.

        Raises:
            ConfigurationError: If the user did not leave the kernel open, or an optimizer cannot run with it.
        """
        if self._asked != "auto":
            raise ConfigurationError(f'optimizer_kernel="{self._asked}" leaves nothing to choose; "auto" does.')
        free = self._free()
        self._undo_kernels()
        for optimizer in free:
            self._changes.append(set_kernel(optimizer, kernel))
        self._why["optimizer_kernel"] = f"{kernel}, {why}"
        log.info("Optimizer kernel: %s.", self._why["optimizer_kernel"])

    def set_loss_chunk(self, rows: int | None, *, why: str) -> None:
        """Compute the module's loss in chunks of `rows` rows of logits.

        None leaves the size to the module. `rows` is one of `chunk_choices`; `why` is the reason, for people.

        Raises:
            ConfigurationError: If the module does not offer it.
        """
        if rows is not None and rows == self.loss_chunk:
            return
        self._undo_chunk()
        if rows is None:
            return
        assert self._module is not None, "memory options are set once fit has begun"
        self._chunk, self.loss_chunk = LossChunk(self._module, rows), rows
        self._why["loss_chunk"] = f"{rows} rows, {why}{self._chunk.how}"
        log.info("Chunk of the loss: %s.", self._why["loss_chunk"])

    def set_attention(self, attention: Literal["chunked"], *, why: str) -> None:
        """Compute attention in chunks from here on; `why` is the reason, for people.

        Raises:
            ConfigurationError: If the module holds compiled modules.
        """
        if self._attention is not None:
            return
        assert self._module is not None, "memory options are set once fit has begun"
        self._attention = AttentionOption(self._module)
        self._why["attention"] = f"{attention}, {why}"
        log.info("Attention: %s.", self._why["attention"])

    def end(self, *, trained: bool = False) -> None:
        """Restore module, optimizers and attention to their state before `begin`.

        `trained` says whether a step has run.
        """
        self._undo_kernels()
        if self._attention is not None:
            self._attention.undo(trained=trained)
        self._attention = None
        self._undo_chunk()
        self._module, self._optimizers = None, []

    def _free(self) -> list[Optimizer]:
        """Return the optimizers that a plan may set a kernel for, including those it has set."""
        if self._asked != "auto":
            return []
        changed = {id(change.optimizer) for change in self._changes}
        return [one for one in self._optimizers if id(one) in changed or not asks_for_kernel(one)]

    def _undo_kernels(self) -> None:
        for change in self._changes:
            change.undo()
        self._changes = []

    def _undo_chunk(self) -> None:
        if self._chunk is not None:
            self._chunk.undo()
        self._chunk = self.loss_chunk = None
