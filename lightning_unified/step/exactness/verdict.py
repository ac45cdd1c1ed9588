"""The verdict of the exactness check, and layers that mix rows by design."""

from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses import LossRule

__all__ = ["Verdict", "batch_norms_of", "refuse_batch_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The findings of all checks so far.

    Args:
        rule: By what micro-batches are weighted.
        conclusive: Whether gradients said so; if not, the rule is only the likeliest one.
        reason: In words: which rule, and how well it agreed, or why nothing could be told.
        noise: What is to be said of random draws; empty if nothing.
        unmergeable: Names of logged and paths of returned values that no rule merges.
        left: Paths that the step writes once a micro-batch, outside what a check runs.
    """

    rule: LossRule
    conclusive: bool
    reason: str
    noise: str = ""
    unmergeable: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def refuse_batch_norm(module: L.LightningModule, *, rows: int, within: Sequence[str] = ()) -> None:
    """Raise `SplitError` if `module` has BatchNorm in train mode, whose statistics are of the rows run at once.

    Args:
        module: The module.
        rows: Of the batch.
        within: Names of the submodules that alone do not run whole batches; none for all of the module.
    """
    norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training]
    norms = [name for name in norms if not within or any(f"{name}.".startswith(f"{one}.") for one in within)]
    if norms:
        raise SplitError(
            f"{type(module).__name__} has BatchNorm in train mode ({norms[0]} and {len(norms) - 1} more): its statistics are of the rows run "
            f'at once, so a batch of {rows} rows cannot be split exactly. Accept statistics per micro-batch with batch_norm="micro", use '
            "GroupNorm, put these layers in eval mode, or raise the budget."
        )


def batch_norms_of(module: L.LightningModule) -> tuple[str, ...]:
    """Return where the paths of BatchNorm layers in train mode begin; a run that splits them has accepted statistics of micro-batches."""
    own = type(module).__name__
    norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training]
    return tuple(f"{own}.{name}." for name in norms)
