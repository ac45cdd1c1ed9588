"""Activation checkpointing: which blocks of a module run again in the backward pass, and why.

`CheckpointedBlocks` applies one policy to a module until it is undone. `ActivationCheckpointing` keeps the choice of a run: as the user
asked, as a plan sets it before the first step, or all blocks after memory ran out.
"""

import logging
from typing import Any, Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.blocks import Blocks, find_blocks
from lightning_unified.nn.recomputing import RecomputePolicy, Recomputing

__all__ = ["ActivationCheckpointing", "CheckpointedBlocks", "recompute_policies"]

log = logging.getLogger("lightning_unified")

NONE, ALL = RecomputePolicy(blocks=0), RecomputePolicy(blocks="all")


class ActivationCheckpointing:
    """The choice of one run: as the user asked, as a plan sets it, or all blocks after memory ran out.

    Args:
        asked: True or False from the start, or `"auto"`: as the module is, until `set` or `more` is called.

    Attributes:
        policy: What is recomputed; None where the module is as it is and does not say.
        reason: Why, and which blocks.
    """

    def __init__(self, asked: bool | Literal["auto"]) -> None:
        self._asked = asked
        self._module: L.LightningModule | None = None
        self._memory_option: CheckpointedBlocks | None = None
        self.policy: RecomputePolicy | None = None if asked == "auto" else ALL if asked else NONE
        self.reason = "as asked" if asked != "auto" else "as the module is"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: the choice, and no hold on a module."""
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
        """Return the policies that a plan may `set`; a single one if the user chose."""
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
            memory_option = CheckpointedBlocks(self._module, policy)
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
        """Restore the module as before `begin`; its own `recompute` attribute stays as the user asked."""
        self._let_go()
        self._module = None


class CheckpointedBlocks:
    """A policy on a module, from construction until `undo`.

    A module with a `recompute` attribute (a bool that its forward reads) knows best: it is set, and can mean all or none. One that
    declares its `recompute_blocks` as well can do the rest too: its switch is then off and some of the blocks get stand-ins, as
    those of a module without a switch do.

    Args:
        module: The module, trained or a fake copy of one.
        policy: What is recomputed.

    Attributes:
        policy: The same, with the number of blocks there are.
        blocks: The blocks the policy counts in; None where the module's own switch was set.
        how: By what, for people: `"12 blocks of net.layers (Block), detected"`, or `"by GearHead.recompute"`.

    Raises:
        ConfigurationError: If the module has no blocks, or a switch that cannot mean the policy.
    """

    def __init__(self, module: L.LightningModule, policy: RecomputePolicy) -> None:
        self._module = module
        self._switch = has_switch(module)
        self._before = bool(module.recompute) if self._switch else False
        self._recomputing: Recomputing | None = None
        self.blocks: Blocks | None = None
        self.policy = policy
        if self._switch and policy in {NONE, ALL}:
            self.how = f"by {type(module).__name__}.recompute"
            module.recompute = policy == ALL  # type: ignore[assignment]
        elif policy == NONE:
            self.how = "as the module is"
        else:
            self._stand_in(module, policy)

    def _stand_in(self, module: L.LightningModule, policy: RecomputePolicy) -> None:
        kind = type(module).__name__
        if self._switch and not hasattr(module, "recompute_blocks"):
            raise ConfigurationError(
                f"{kind} recomputes by its own `recompute`, which means all blocks or none, not {policy}. Ask for one of these, or "
                f"let {kind} name its blocks in recompute_blocks."
            )
        try:
            self.blocks = find_blocks(module)
        except ValueError as error:
            raise ConfigurationError(
                f"{error} A module that recomputes by itself has a `recompute` attribute to set."
            ) from error
        plain = self.blocks.plain
        count = policy.blocks if policy.blocks == "all" or policy.blocks < len(plain) else "all"
        self.policy = policy = RecomputePolicy(blocks=count, keep_attention=policy.keep_attention, of=len(plain))
        part = "" if count == "all" else f"the first {count} of "
        self.how = f"{part}{self.blocks}{', attention kept' if policy.keep_attention else ''}"
        if self._switch:
            module.recompute = False  # type: ignore[assignment]
        self._recomputing = Recomputing(policy.choose(plain), keep_attention=policy.keep_attention)

    def undo(self) -> None:
        """Leave the module as it was; once is enough, twice does no harm."""
        if self._recomputing is not None:
            self._recomputing.remove()
            self._recomputing = None
        if self._switch:
            self._module.recompute = self._before  # type: ignore[assignment]
        self._switch = False


def recompute_policies(module: L.LightningModule) -> tuple[RecomputePolicy, ...]:
    """Return the policies that the module allows, from the least recomputed to the most.

    A module without blocks allows `NONE` only.

    Keeping attention is among it for the whole of the blocks and for each part, for only a step tells whether there is any.
    """
    if has_switch(module) and not hasattr(module, "recompute_blocks"):
        return NONE, ALL
    try:
        count = len(find_blocks(module).plain)
    except ValueError:
        return (NONE,)
    if not count:
        return (NONE,)
    sizes = [*range(1, count), "all"]
    return NONE, *(
        RecomputePolicy(blocks=size, keep_attention=keep, of=count)  # type: ignore[arg-type]
        for size in sizes
        for keep in (True, False)
    )


def has_switch(module: L.LightningModule) -> bool:
    """Return whether the module recomputes by an attribute of its own."""
    return hasattr(module, "recompute") and not callable(module.recompute)
