"""Whether a fit keeps activations or recomputes them in the backward pass, which of them, and how that came about."""

import logging
from typing import Any, Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options.recomputed_blocks import (
    ALL,
    NONE,
    RecomputedBlocks,
    has_switch,
    recompute_policies,
)

__all__ = ["Recomputation"]

log = logging.getLogger("lightning_unified")


class Recomputation:
    """Keeps what of a module is recomputed: as asked, as a plan sets it before the first step, more of it for want of memory.

    Args:
        asked: True or False from the start, or `"auto"`: as the module is, until `set` or `more` is called.

    Attributes:
        policy: What is recomputed; None where the module is as it is and does not say.
        reason: Why, and which blocks.

    Raises:
        ConfigurationError: If `asked` is none of the three.
    """

    def __init__(self, asked: bool | Literal["auto"]) -> None:
        if asked not in ("auto", True, False):
            raise ConfigurationError(f'recompute={asked!r}: give true, false or "auto".')
        self._asked = asked
        self._module: L.LightningModule | None = None
        self._memory_option: RecomputedBlocks | None = None
        self.policy: RecomputePolicy | None = None if asked == "auto" else ALL if asked else NONE
        self.reason = "as asked" if asked != "auto" else "as the module is"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps: the choice, and no hold on a module."""
        return {**vars(self), "_module": None, "_memory_option": None}

    @property
    def on(self) -> bool | None:
        """Whether any activations are recomputed; None where the module is as it is and does not say."""
        return None if self.policy is None else self.policy != NONE

    @property
    def everything(self) -> bool:
        """Whether nothing is left to recompute."""
        return self.policy is not None and self.policy.everything

    def begin(self, module: L.LightningModule) -> None:
        """Begin a fit of `module`, as asked.

        Raises:
            ConfigurationError: If recomputation was asked for and there is nothing to recompute.
        """
        self.end()
        self._module = module
        switch = has_switch(module)
        if self._asked == "auto":
            self.policy, self.reason = (ALL if module.recompute else NONE) if switch else None, "as the module is"
        elif switch:
            module.recompute = self._asked  # type: ignore[assignment]
            self.policy = ALL if self._asked else NONE
            self.reason = f"as asked, by {type(module).__name__}.recompute"
        elif self._asked:
            self._pull(ALL, "as asked")

    def choices(self) -> tuple[RecomputePolicy, ...]:
        """Return what a plan may `set`, from the least recomputed to the most: one alone where that was asked for."""
        if self._asked != "auto":
            return (ALL if self._asked else NONE,)
        assert self._module is not None, "recomputation is chosen once fit has begun"
        return (
            (ALL,)
            if has_switch(self._module) and self.policy == ALL and self._memory_option is None
            else recompute_policies(self._module)
        )

    def set(self, policy: RecomputePolicy, *, why: str) -> None:
        """Recompute by `policy` from here on; between two steps, or before the first.

        Args:
            policy: One of `choices`.
            why: For people.

        Raises:
            ConfigurationError: If something else was asked for, or the module cannot do it.
        """
        choices = self.choices()
        if policy not in choices:
            raise ConfigurationError(
                f"recompute={policy} for {type(self._module).__name__}: it can be {', '.join(map(str, choices))}. "
                'memory.recompute="auto" leaves most to choose.'
            )
        self._pull(policy, why)

    def more(self, why: str) -> bool:
        """Recompute everything, where that was left open; return whether it made a difference."""
        if self._module is None or self._asked != "auto" or self.everything:
            return False
        try:
            self._pull(ALL, why)
        except ConfigurationError as error:
            self.reason = f"as the module is: {error}"
        return self._memory_option is not None

    def _pull(self, policy: RecomputePolicy, why: str) -> None:
        assert self._module is not None, "recomputation is set once fit has begun"
        self._let_go()
        try:
            memory_option = RecomputedBlocks(self._module, policy)
        except ConfigurationError as error:
            raise ConfigurationError(f"recompute={self._asked}: {error}") from error
        self.policy = memory_option.policy
        if memory_option.blocks is not None and not memory_option.blocks.plain:
            self.reason = f"as the module is: {memory_option.how}"
            return
        self._memory_option = memory_option
        by = ", " if memory_option.blocks is None else ": "
        self.reason = f"{why}{by}{memory_option.how}"
        if self.on:
            log.info("Activations are recomputed in the backward pass, %s.", self.reason)

    def _let_go(self) -> None:
        if self._memory_option is not None:
            self._memory_option.undo()
        self._memory_option = None

    def end(self) -> None:
        """Leave the module as it was before `begin`; what was asked of its own attribute stays."""
        self._let_go()
        self._module = None
