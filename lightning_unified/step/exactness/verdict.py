"""The verdict of the exactness check, and layers that mix rows by design."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import lightning as L
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.errors import SplitError
from lightning_unified.nn.module_tree.walks import named_modules_of
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.losses import LossRule

__all__ = [
    "BatchNormsThatMix",
    "Passes",
    "Verdict",
    "batch_norms_of",
    "refusal_of_batch_norms",
    "refuse_batch_norm",
    "refuse_counting_embeddings",
]


@dataclass(frozen=True, slots=True)
class Passes:
    """How the passes of micro-batches must run.

    Args:
        is_proportional: Whether gradients, and what backward passes write and log, are proportional to the loss.
        reads_gradients: Whether the step reads gradients of the batch before.
    """

    is_proportional: bool = True
    reads_gradients: bool = False

    def after(self, findings: Findings, *, reads_gradients: bool) -> "Passes":
        """Return how passes must run after a check with these findings."""
        return Passes(self.is_proportional and findings.is_proportional, self.reads_gradients or reads_gradients)


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
        passes: How the passes of micro-batches must run.
    """

    rule: LossRule
    conclusive: bool
    reason: str
    noise: str = ""
    unmergeable: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    passes: Passes = Passes()

    @classmethod
    def found(cls, findings: Findings, unmergeable: tuple[str, ...], passes: Passes) -> "Verdict":
        """Return the verdict that follows from the findings of a check."""
        rule, difference = findings.agreeing[0], findings.difference
        reason = f"{rule.name}: gradients of {findings.rows} rows, whole and split, differ by {difference:.1e}"
        return cls(
            rule=rule,
            conclusive=True,
            reason=reason,
            noise=findings.noise,
            unmergeable=unmergeable,
            passes=passes,
        )

    @classmethod
    def recalled(cls, rule: LossRule, state: Mapping[str, Any], unmergeable: tuple[str, ...]) -> "Verdict":
        """Return the verdict of the run that this run continues."""
        why = f"{rule.name}: found by the run that this one continues"
        passes = Passes(**state.get("passes", {}))
        return cls(rule=rule, conclusive=True, reason=why, noise=state["noise"], unmergeable=unmergeable, passes=passes)

    @classmethod
    def unchecked(cls, rule: LossRule, why: str, unmergeable: tuple[str, ...]) -> "Verdict":
        """Return the verdict for an undecided check, with the likeliest rule."""
        return cls(rule=rule, conclusive=False, reason=f"{rule.name}, unchecked: {why}", unmergeable=unmergeable)

    def without_rules_for(self, names: tuple[str, ...]) -> "Verdict":
        """Return this verdict with `names` as what no rule merges; the same object if that is known."""
        return self if names == self.unmergeable else replace(self, unmergeable=names)

    def under(self, rule: LossRule | None) -> "Verdict":
        """Return this verdict with the first rule that also gives the loss of all rows; None keeps the rule."""
        if rule is None or rule.name == self.rule.name:
            return self if rule is None else replace(self, rule=rule)
        return replace(self, rule=rule, reason=f"{rule.name}: losses of all rows of a batch, whole and split, agree")


class BatchNormsThatMix:
    """Notes the BatchNorm layers that run with statistics of the batch inside the block.

    A step may put layers into eval mode before it runs them, or not run them. So the modes before the step do not tell.

    Args:
        module: The module whose step runs.

    Attributes:
        names: The names of these layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._handles = module, list[Any]()
        self.names: list[str] = []

    def __enter__(self) -> Self:
        for name, layer in named_modules_of(self._module).items():
            if isinstance(layer, _BatchNorm):
                self._handles.append(layer.register_forward_pre_hook(partial(self._note, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def has_layers(self) -> bool:
        """Whether the module has BatchNorm layers."""
        return bool(self._handles)

    def _note(self, name: str, layer: Any, _arguments: Any) -> None:
        mixes = layer.training or (layer.running_mean is None and layer.running_var is None)
        if mixes and name not in self.names:
            self.names.append(name)


def refuse_batch_norm(module: L.LightningModule, *, within: Sequence[str] = ()) -> None:
    """Raise `SplitError` if `module` has BatchNorm in train mode, run by its step or not.

    Args:
        module: The module.
        within: The names of the submodules that run in row chunks; empty if the whole module does.
    """
    norms = _norms_in_training(module)
    norms = [name for name in norms if not within or any(f"{name}.".startswith(f"{one}.") for one in within)]
    if norms:
        raise refusal_of_batch_norms(type(module).__name__, norms)


def refusal_of_batch_norms(whose: str, norms: Sequence[str]) -> SplitError:
    """Return the error for BatchNorm layers with statistics of the rows that run at once.

    Args:
        whose: The name of the module's class.
        norms: The names of the layers.
    """
    others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
    return SplitError(
        f"{whose} has BatchNorm in train mode ({norms[0]}{others}): its statistics are of the rows run at once, so "
        'batches cannot be split exactly. Accept statistics per micro-batch with batch_norm="micro", use GroupNorm, put these layers in '
        "eval mode, or raise the budget."
    )


def batch_norms_of(module: L.LightningModule) -> tuple[str, ...]:
    """Return the path prefixes of BatchNorm layers in train mode.

    A run that splits these layers has accepted statistics per micro-batch.
    """
    return tuple(f"{type(module).__name__}.{name}." for name in _norms_in_training(module))


def _norms_in_training(module: L.LightningModule) -> list[str]:
    modules = named_modules_of(module).items()
    return [name for name, child in modules if isinstance(child, _BatchNorm) and child.training]


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
