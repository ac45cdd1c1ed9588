"""The memory option of recomputation: which blocks of a module run again in the backward pass."""

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.blocks import Blocks, find_blocks
from lightning_unified.nn.recomputing import RecomputePolicy, Recomputing

__all__ = ["RecomputedBlocks", "has_switch", "recompute_policies"]

NONE, ALL = RecomputePolicy(blocks=0), RecomputePolicy(blocks="all")


class RecomputedBlocks:
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
    """Return what the module can be asked for, from the least recomputed to the most; none alone where it has nothing to recompute.

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
