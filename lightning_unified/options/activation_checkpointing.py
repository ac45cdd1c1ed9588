"""Activation checkpointing: choose the blocks that run again in the backward pass.

`CheckpointedBlocks` applies one policy to a module until it is undone. `ActivationCheckpointing` holds the choice of a run: the user's
setting, a plan's choice before the first step, or all blocks after memory ran out.
"""

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.compiled import KeepsShare, is_compiled, keeps_share
from lightning_unified.nn.module_tree.blocks import Blocks, find_blocks
from lightning_unified.nn.recomputing import RecomputePolicy, Recomputing
from lightning_unified.nn.second_run.runs import runs_again
from lightning_unified.nn.stand_in import StandIn

__all__ = ["ActivationCheckpointing", "CheckpointedBlocks", "recompute_policies"]

log = logging.getLogger("lightning_unified")

NONE, ALL = RecomputePolicy(blocks=0), RecomputePolicy(blocks="all")
# of a compiled block's activations; shares between two of these gain a few percent of the step time
_KEPT = (0.5, 0.35, 0.3, 0.2, 0.1, 0.0)


class ActivationCheckpointing:
    """The activation checkpointing of one run, and its reason.

    The choice is the user's, a plan's, or all blocks after memory ran out.

    Args:
        asked: True or False from the start, or `"auto"`: the module stays as it is until `set` or `more` is called.

    Attributes:
        policy: The recompute policy; None if the module stays as it is and has no `recompute` attribute.
        reason: The reason for the policy, and the blocks it covers.
    """

    def __init__(self, asked: bool | Literal["auto"]) -> None:
        self._asked = asked
        self._module: L.LightningModule | None = None
        self._memory_option: CheckpointedBlocks | None = None
        self._left_out: set[type] = set()
        self.policy: RecomputePolicy | None = None if asked == "auto" else ALL if asked else NONE
        self.reason = "as asked" if asked != "auto" else "as the module is"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: the choice, without the module."""
        return {**vars(self), "_module": None, "_memory_option": None}

    @property
    def on(self) -> bool | None:
        """Whether any activations are recomputed; None if `policy` is unknown."""
        return None if self.policy is None else self.policy != NONE

    @property
    def everything(self) -> bool:
        """Whether the policy recomputes all of every block."""
        return self.policy is not None and self.policy.everything

    def begin(self, module: L.LightningModule) -> None:
        """Begin a fit of `module` with the user's setting.

        Raises:
            ConfigurationError: If the user asked for recomputation and there is nothing to recompute.
        """
        self.end()
        self._module = module
        self._left_out.clear()
        switch = has_switch(module)
        if self._asked == "auto":
            self.policy, self.reason = (ALL if module.recompute else NONE) if switch else None, "as the module is"
        elif switch:
            module.recompute = self._asked  # type: ignore[assignment]
            self.policy = ALL if self._asked else NONE
            self.reason = f"as asked, by {type(module).__name__}.recompute"
            log.info("%s.recompute is set to %s, as asked.", type(module).__name__, self._asked)
        elif self._asked:
            self._pull(ALL, "as asked")

    def choices(self) -> tuple[RecomputePolicy, ...]:
        """Return the policies that a plan may `set`; a single one if the user chose it."""
        if self._asked != "auto":
            return (ALL if self._asked else NONE,)
        assert self._module is not None, "recomputation is chosen once fit has begun"
        return (
            (ALL,)
            if has_switch(self._module) and self.policy == ALL and self._memory_option is None
            else recompute_policies(self._module)
        )

    def set(self, policy: RecomputePolicy, *, why: str) -> None:
        """Recompute by `policy` from here on; call it between two steps, or before the first.

        The policy is one of `choices`; `why` is the reason, for people.

        Raises:
            ConfigurationError: If the user chose another policy, or the module does not support this one.
        """
        choices = self.choices()
        if replace(policy, last=0, kept_last=None) not in choices:
            raise ConfigurationError(
                f"recompute={policy} for {type(self._module).__name__}: it can be {', '.join(map(str, choices))}. "
                'memory.recompute="auto" leaves most to choose.'
            )
        self._pull(policy, why)

    def more(self, why: str) -> bool:
        """Recompute everything if the user left that open; return whether this changed the run."""
        if self._module is None or self._asked != "auto" or self.everything:
            return False
        try:
            self._pull(ALL, why)
        except ConfigurationError as error:
            self.reason = f"as the module is: {error}"
        return self._memory_option is not None

    def leave_out(self, kind: Any) -> bool:
        """Recompute no blocks of the class `kind` from here on, if the user left that open.

        Return whether this changed the run.
        """
        blocks = None if self._memory_option is None else self._memory_option.blocks
        is_known = blocks is not None and any(type(block) is kind for block in blocks.plain)
        if self._asked != "auto" or not is_known or kind in self._left_out:
            return False
        self._left_out.add(kind)
        return True

    def reapply(self) -> None:
        """Apply the policy once more, because the blocks have been compiled since."""
        if self._memory_option is not None and self.policy is not None:
            self._pull(self.policy, self.reason.partition(":")[0])

    def _pull(self, policy: RecomputePolicy, why: str) -> None:
        assert self._module is not None, "recomputation is set once fit has begun"
        self._let_go()
        try:
            memory_option = CheckpointedBlocks(self._module, policy, left_out=self._left_out)
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
        """Restore the module as before `begin`.

        With an explicit True or False, the module's own `recompute` attribute keeps that value.
        """
        self._let_go()
        self._module = None


class CheckpointedBlocks:
    """A recompute policy on a module, from construction until `undo`.

    The class of a module may declare an attribute `recompute`, a bool that its forward reads. The policies "all" and "none" set this attribute. If the
    module also declares `recompute_blocks`, other policies turn the attribute off, and some of the blocks get stand-ins. Blocks of a
    module without the attribute get stand-ins too.

    Args:
        module: The module.
        policy: The policy.
        left_out: Classes of blocks that keep their activations; the caller may add to it at any time.

    Attributes:
        policy: The policy, with the module's number of blocks.
        blocks: The blocks that the policy counts in; None where the module's own attribute was set.
        how: The means, for people: `"12 blocks of net.layers (Block), detected"`, or `"by GearHead.recompute"`.

    Raises:
        ConfigurationError: If the module has no blocks, or its attribute does not support the policy.
    """

    def __init__(self, module: L.LightningModule, policy: RecomputePolicy, *, left_out: Collection[type] = ()) -> None:
        self._module, self._left_out = module, left_out
        self._switch = has_switch(module)
        self._before = bool(module.recompute) if self._switch else False
        self._recomputing: Recomputing | None = None
        self._logs: list[_LogsOnce] = []
        self._keeping: list[KeepsShare] = []
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
                f"{error} A module that recomputes by itself has a `recompute` attribute in its class to set."
            ) from error
        plain = self.blocks.plain
        if policy.kept is not None:
            self._keep(policy)
            return
        count = policy.blocks if policy.blocks == "all" or policy.blocks < len(plain) else "all"
        self.policy = policy = RecomputePolicy(blocks=count, keep_attention=policy.keep_attention, of=len(plain))
        part = "" if count == "all" else f"the first {count} of "
        self.how = f"{part}{self.blocks}{', attention kept' if policy.keep_attention else ''}"
        if self._switch:
            module.recompute = False  # type: ignore[assignment]
        self._recomputing = Recomputing(
            policy.choose(plain), keep_attention=policy.keep_attention, left_out=self._left_out
        )
        self._logs = [_LogsOnce(one, "log") for one in module.modules() if isinstance(one, L.LightningModule)]
        for logs in self._logs:
            logs.install()

    def _keep(self, policy: RecomputePolicy) -> None:
        """Let the graphs of compiled blocks keep shares of their activations."""
        assert self.blocks is not None
        calls = [keeps_share(block) for block in self.blocks.plain]
        self._keeping = [call for call in calls if call is not None]
        if len(self._keeping) < len(calls) or not calls:
            self._keeping = []
            raise ConfigurationError(
                f"{self.policy}: {self.blocks} are not compiled by the strategy, whose graphs alone can keep fewer activations. Set "
                'memory.compile="blocks", or checkpoint a number of blocks.'
            )
        larger = "" if policy.kept_last is None else f", and {100 * policy.kept_last:.3g} % in the last {policy.last}"
        self.how = f"{self.blocks}, whose graphs keep {100 * (policy.kept or 0):.3g} % of their activations{larger}"
        if self._switch:
            self._module.recompute = False  # type: ignore[assignment]
        for call, share in zip(self._keeping, policy.shares(len(calls)), strict=True):
            call.keep(share)

    @property
    def count(self) -> int:
        """Number of blocks that run again as a whole in the backward pass; 0 if they are unknown."""
        if self.policy.kept is not None:
            return 0
        if self.policy.blocks != "all":
            return self.policy.blocks
        try:
            return len((self.blocks or find_blocks(self._module)).plain)
        except ValueError:
            return 0

    def undo(self) -> None:
        """Restore the module; a second call does nothing."""
        if self._recomputing is not None:
            self._recomputing.remove()
            self._recomputing = None
        for logs in self._logs:
            logs.remove()
        self._logs = []
        for call in self._keeping:
            call.keep(None)
        self._keeping = []
        if self._switch:
            self._module.recompute = self._before  # type: ignore[assignment]
        self._switch = False


class _LogsOnce(StandIn):
    """Replacement of a module's `log`, which the second run of a block calls without effect."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not (self.is_on and runs_again()):
            self.function(*args, **kwargs)


def recompute_policies(module: L.LightningModule) -> tuple[RecomputePolicy, ...]:
    """Return the policies that the module allows, from the least recomputed to the most.

    A module without blocks allows `NONE` only. Each number of blocks comes with and without saved attention outputs, because only a step
    shows whether the blocks have any attention. Compiled blocks come without: the modes that save these outputs see nothing of compiled
    code. Graphs of blocks that this package compiled keep shares of their activations instead, which costs less time for the same memory.
    """
    if has_switch(module) and not hasattr(module, "recompute_blocks"):
        return NONE, ALL
    try:
        plain = find_blocks(module).plain
    except ValueError:
        return (NONE,)
    count = len(plain)
    if not count:
        return (NONE,)
    if all(keeps_share(block) is not None for block in plain):
        return NONE, *(RecomputePolicy(blocks="all", kept=share, of=count) for share in _KEPT)
    sizes = [*range(1, count), "all"]
    return NONE, *(
        RecomputePolicy(blocks=size, keep_attention=keep, of=count)  # type: ignore[arg-type]
        for size in sizes
        for keep in ((False,) if any(map(is_compiled, plain)) else (True, False))
    )


def has_switch(module: L.LightningModule) -> bool:
    """Return whether the module's class declares `recompute`, and its value is a bool.

    An attribute that only the object has, or of another type, is the user's own and is neither read nor set.
    """
    return hasattr(type(module), "recompute") and type(module.recompute) is bool
