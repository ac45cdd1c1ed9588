"""The verdict of the exactness check, and layers that mix rows by design."""

from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.losses import LossRule

__all__ = ["Verdict", "batch_norms_of", "refuse_batch_norm", "refuse_counting_embeddings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The findings of all checks so far.

    Args:
        rule: The loss rule that weights micro-batches.
        conclusive: Whether gradients agreed under the rule; if not, the rule is only the likeliest one.
        reason: A sentence: the rule and its difference, or the reason why the check was undecided.
        noise: A note on random draws; empty if there is none.
        unmergeable: The names of logged values and the paths of returned values that no rule merges.
        left: The paths of state that each micro-batch writes and that no rule merges.
    """

    rule: LossRule
    conclusive: bool
    reason: str
    noise: str = ""
    unmergeable: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @classmethod
    def found(cls, findings: Findings, unmergeable: tuple[str, ...]) -> "Verdict":
        """Return the verdict that follows from the findings of a check."""
        rule, difference = findings.agreeing[0], findings.difference
        reason = f"{rule.name}: gradients of {findings.rows} rows, whole and split, differ by {difference:.1e}"
        return cls(rule=rule, conclusive=True, reason=reason, noise=findings.noise, unmergeable=unmergeable)

    @classmethod
    def unchecked(cls, rule: LossRule, why: str, unmergeable: tuple[str, ...]) -> "Verdict":
        """Return the verdict for an undecided check, with the likeliest rule."""
        return cls(rule=rule, conclusive=False, reason=f"{rule.name}, unchecked: {why}", unmergeable=unmergeable)


def refuse_batch_norm(module: L.LightningModule, *, rows: int, within: Sequence[str] = ()) -> None:
    """Raise `SplitError` if `module` has BatchNorm in train mode.

    The statistics of such layers are those of the rows that run at once.

    Args:
        module: The module.
        rows: The number of rows of the batch.
        within: The names of the submodules that run in row chunks; empty if the whole module does.
    """
    norms = _norms_in_training(module)
    norms = [name for name in norms if not within or any(f"{name}.".startswith(f"{one}.") for one in within)]
    if norms:
        raise SplitError(
            f"{type(module).__name__} has BatchNorm in train mode ({norms[0]} and {len(norms) - 1} more): its statistics are of the rows run "
            f'at once, so a batch of {rows} rows cannot be split exactly. Accept statistics per micro-batch with batch_norm="micro", use '
            "GroupNorm, put these layers in eval mode, or raise the budget."
        )


def batch_norms_of(module: L.LightningModule) -> tuple[str, ...]:
    """Return the path prefixes of BatchNorm layers in train mode.

    A run that splits these layers has accepted statistics per micro-batch.
    """
    return tuple(f"{type(module).__name__}.{name}." for name in _norms_in_training(module))


def _norms_in_training(module: L.LightningModule) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training]


def refuse_counting_embeddings(module: L.LightningModule) -> None:
    """Raise `SplitError` if `module` trains an embedding with `scale_grad_by_freq=True`.

    Its gradient divides by the number of times that an id occurs among the rows that run at once.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    name = next(
        (
            name
            for name, child in module.named_modules()
            if isinstance(child, kinds) and child.scale_grad_by_freq and child.weight.requires_grad
        ),
        None,
    )
    if name is not None:
        raise SplitError(
            f"{type(module).__name__}.{name} has scale_grad_by_freq=True: its gradient divides by the number of times that an id occurs among the rows that "
            "run at once, so batches cannot be split exactly. Use scale_grad_by_freq=False, raise the budget so that batches run whole, or declare "
            "MicroBatchRules(check=False) to split all the same."
        )
