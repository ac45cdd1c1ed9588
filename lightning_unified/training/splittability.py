"""Whether a module's step may be cut into micro-batches, and by what their losses are weighted: told by gradients before the first cut."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.training.cutter import Cutter
from lightning_unified.training.oom import is_out_of_memory, release_cached_memory
from lightning_unified.training.probe import Undone, draws_or_mixes, gradient_sample, owns_dropout
from lightning_unified.training.weighting import Weighting

__all__ = ["SplittabilityCheck", "Verdict", "refuse_batch_norm", "tolerance"]

_LABELS = ("labels", "label", "targets", "target")
_IGNORED = -100  # what torch's cross_entropy leaves out by default (torch/nn/functional.py, `ignore_index`)
_ATTEMPTS = 3  # at one check, if memory runs out in it: what held memory may be gone the next time
_BFLOAT16 = 2e-2  # see `tolerance`
# What bfloat16 rounds in a deep model beside that: 5.0e-2 of 36 layers of 2,048 with adapters, one completion a pass, on an H200
_DEEPER = 5.0
_TRIES = 3  # batches on which an inconclusive check is made again before the rule in use is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the check found.

    Attributes:
        count: Counts the loss terms of a micro-batch; None counts rows, or leaves it to what the module declares.
        conclusive: Whether gradients said so; if not, the rule is only the likeliest one.
        reason: In words: which rule, and how well it agreed, or why nothing could be told.
    """

    count: Callable[[Any], Any] | None
    conclusive: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    name: str
    per_row: Callable[[Tensor], Tensor] | None = None

    @property
    def count(self) -> Callable[[Any], Any] | None:
        """What counts a micro-batch's terms; a batch without labels counts none, and is then weighted by rows."""
        per_row = self.per_row
        if per_row is None:
            return None
        return lambda part: 0 if (labels := _labels_in(part)) is None else per_row(labels).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """Gradients of two neighbouring units of rows: of both at once, not finite if it is another one each time, and of each."""

    whole: Tensor
    parts: tuple[Tensor, Tensor]
    halves: tuple[Any, Any]

    @property
    def is_finite(self) -> bool:
        return bool(self.whole.isfinite().all())


class SplittabilityCheck:
    """Compares the gradients of a few rows run whole and cut, and takes the rule of weighting under which they are the same.

    Losses would not do: a group-normalised loss cut inside a group can have the same value and another gradient. Two neighbouring
    units of rows of the actual batch run through the real `training_step`, whole and each alone; dropout is off and BatchNorm uses its
    running statistics meanwhile, and everything is put back. One pair costs four small forward and backward passes (the whole twice, to see
    random numbers), whatever the number of rules. The pairs are those whose label counts tell the rules apart best, and the batch's first and last.

    A module that declares `loss_weight` or `loss_is_sum` is held to it. For any other the rules are, in this order: rows, scored
    labels, and scored labels but each row's first, as causal language models score that shift inside. As long as a batch has not told
    those that agree apart, the first is used and later batches are looked at.

    Args:
        trainer: In `fit`.
        rules: How the module declares its batches.
        step: Runs `training_step` as the loop does.
        metrics: The module's torchmetrics objects.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        rules: MicroBatchRules,
        step: Callable[["OrderedDict[str, Any]"], ClosureResult],
        metrics: Callable[[], Sequence[Metric]],
    ) -> None:
        self._trainer, self._step, self._metrics = trainer, step, metrics
        self._module = trainer.lightning_module
        self._rules = rules
        self._cutter = Cutter(self._module, rules)
        self._verdict: Verdict | None = None
        self._tied: list[_Rule] | None = None
        self._tries = 0

    def verdict(self, kwargs: "OrderedDict[str, Any]", *, rows: int, unit: int) -> Verdict:
        """Return by what the micro-batches of this batch are weighted; probes it if that is not settled yet.

        Args:
            kwargs: Of `training_step`, the batch first.
            rows: Of the batch.
            unit: Rows that stay together.

        Raises:
            SplitError: If the batch's gradient is not that of its parts under any rule, so that it cannot be cut exactly.
        """
        if self._verdict is not None and not self._tied:
            return self._verdict
        labels = _labels_in(next(iter(kwargs.values())), rows)
        rules = self._tied or _declared(self._rules) or _rules(labels)
        telling = _telling_starts(labels, self._tied or _rules(labels), rows=rows, unit=unit)
        if self._verdict is not None and self._verdict.conclusive and not telling:
            return self._verdict  # for this batch the rules are one and the same
        starts = list(dict.fromkeys([*telling, 0, rows - 2 * unit]))
        self._tries += 1
        # labels that are left out are there to be left out of a mean; rows would be the rarer rule
        likeliest = rules[1] if telling and len(rules) > 1 and rules[0].per_row is None else rules[0]
        probes = self._probes(kwargs, starts, rows=rows, unit=unit)
        verdict = self._judged(probes, rules, unit=unit, likeliest=likeliest)
        if self._tries >= _TRIES:
            self._tied = None
        self._verdict = verdict
        return verdict

    def _probes(
        self, kwargs: "OrderedDict[str, Any]", starts: Sequence[int], *, rows: int, unit: int
    ) -> list[_Probe] | str:
        """Return the gradients of the pairs that begin at `starts`, or why there are none."""
        found = self._probed(kwargs, starts, rows=rows, unit=unit, in_eval=draws_or_mixes)
        if not isinstance(found, str) and not all(probe.is_finite for probe in found):
            with suppress(Exception):  # whatever a module does in eval mode that its step is not made for
                found = self._probed(kwargs, starts, rows=rows, unit=unit, in_eval=owns_dropout)
        return found

    def _probed(
        self,
        kwargs: "OrderedDict[str, Any]",
        starts: Sequence[int],
        *,
        rows: int,
        unit: int,
        in_eval: Callable[[nn.Module], bool],
    ) -> list[_Probe] | str:
        for _ in range(_ATTEMPTS):
            try:
                with Undone(self._trainer, metrics=self._metrics(), in_eval=in_eval):
                    return [self._probe(kwargs, start, rows=rows, unit=unit) for start in starts]
            except (RuntimeError, MemoryError, ValueError, IndexError, AssertionError) as error:
                if not is_out_of_memory(error):
                    raise SplitError(self._does_not_run(error, unit)) from error
            # past the `except` block, whose traceback held the frames
            release_cached_memory(self._trainer.strategy.root_device)
            starts = starts[:1]
        return "memory ran out while it was checked"

    def _probe(self, kwargs: "OrderedDict[str, Any]", start: int, *, rows: int, unit: int) -> _Probe:
        key, batch = next(iter(kwargs.items()))
        middle, end = start + unit, start + 2 * unit

        def gradient(first: int, last: int) -> Tensor:
            part = apply_to_collection(
                self._cutter.cut(batch, first, last, rows=rows), Tensor, _own
            )  # a step may write in place
            return gradient_sample(self._trainer, partial_step(part))

        def partial_step(part: Any) -> Callable[[], ClosureResult]:
            return lambda: self._step(OrderedDict(kwargs, **{key: part}))

        whole = gradient(start, end)
        again = gradient(start, end)
        informative = bool(whole.isfinite().all()) and bool(whole.any())
        if informative and _distance(again, whole, whole.norm()) > tolerance(self._trainer):
            whole = torch.full_like(whole, torch.nan)  # it draws random numbers: nothing can be compared
        return _Probe(
            whole=whole,
            parts=(gradient(start, middle), gradient(middle, end)),
            halves=(self._cutter.cut(batch, start, middle, rows=rows), self._cutter.cut(batch, middle, end, rows=rows)),
        )

    def _judged(self, probes: list[_Probe] | str, rules: list[_Rule], *, unit: int, likeliest: _Rule) -> Verdict:
        """Return the verdict on the gradients found, and note which rules they do not tell apart."""
        if isinstance(probes, str):
            return self._inconclusive(rules, likeliest, probes)
        told = [probe for probe in probes if probe.is_finite and bool(probe.whole.any())]
        if not told:
            return self._inconclusive(
                rules,
                likeliest,
                "its gradient is random without dropout, or not finite"
                if not all(probe.is_finite for probe in probes)
                else "its gradient is zero on the rows looked at",
            )
        limit = tolerance(self._trainer)
        off = [max(self._disagreement(rule, probe, unit) for probe in told) for rule in rules]
        agreeing = [(rule, value) for rule, value in zip(rules, off, strict=True) if value <= limit]
        if not agreeing:
            adds = max(_distance(sum(probe.parts), probe.whole, probe.whole.norm()) for probe in told) <= limit
            raise SplitError(self._refusal(rules, off, unit=unit, adds=adds))
        close = max(2 * min(value for _, value in agreeing), limit / 20)
        closest = [(rule, value) for rule, value in agreeing if value <= close]
        self._tied = [rule for rule, _ in closest] if len(closest) > 1 else None
        rule, value = closest[0]
        return Verdict(
            count=rule.count,
            conclusive=True,
            reason=f"{rule.name}: gradients of {2 * unit} rows, whole and cut, differ by {value:.1e}",
        )

    def _inconclusive(self, rules: list[_Rule], likeliest: _Rule, why: str) -> Verdict:
        self._tied = rules
        return Verdict(count=likeliest.count, conclusive=False, reason=f"{likeliest.name}, unchecked: {why}")

    def _disagreement(self, rule: _Rule, probe: _Probe, unit: int) -> float:
        """Return how far the parts' gradients, weighted by `rule`, are from the whole's, relative to their size.

        Of a module that declares how its loss adds up, what bfloat16 rounds may be more, as long as no other weights would fit better:
        rounding lies across the parts' gradients, and wrong weights along them.
        """
        weighting = Weighting(self._rules, probe.halves, [unit, unit], count=rule.count)
        shares = [1.0 if (share := weighting.share(index)) is None else share for index in range(2)]
        terms = [part * share for part, share in zip(probe.parts, shares, strict=True) if share]
        scale = torch.stack([probe.whole.norm(), *(term.norm() for term in terms)]).max()
        distance = _distance(torch.stack(terms).sum(0), probe.whole, scale)
        if not _declared(self._rules) or tolerance(self._trainer) < _BFLOAT16:
            return distance
        return max(distance / _DEEPER, _along(torch.stack(terms).sum(0) - probe.whole, terms, scale))

    def _refusal(self, rules: list[_Rule], off: list[float], *, unit: int, adds: bool) -> str:
        name = type(self._module).__name__
        tried = "; ".join(f"{rule.name}: {value:.1e}" for rule, value in zip(rules, off, strict=True))
        hint = " Its loss adds up over rows: set loss_is_sum=True." if adds else ""
        return (
            f"{name} cannot be cut exactly: the gradient of {2 * unit} rows differs from that of its two halves by ({tried}); at most "
            f"{tolerance(self._trainer):.0e} is rounding.{hint} The ways out, in MicroBatchRules: loss_weight, the number of terms its loss is a mean over; "
            "loss_is_sum=True with totals from prepare; unit=n for a loss over groups of n rows; "
            "splittable=False to run batches whole (a contrastive loss); check=False to cut it all the same."
        )

    def _does_not_run(self, error: BaseException, unit: int) -> str:
        return (
            f"{type(self._module).__name__}.training_step fails on {unit} or {2 * unit} rows of its batch ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0]}), so the batch cannot be cut. Set MicroBatchRules(unit=n) if n rows belong together, "
            "splittable=False to run batches whole, or check=False if it is sound on the micro-batches used."
        )


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
            f'at once, so a batch of {rows} rows cannot be cut exactly. Accept statistics per micro-batch with batch_norm="micro", use '
            "GroupNorm, put these layers in eval mode, or raise the budget."
        )


def tolerance(trainer: L.Trainer) -> float:
    """Return up to which relative difference two gradients are the same but for rounding.

    float64: 1e-6, for losses are often computed in float32 all the same; float32: 1e-4; where matrix products round to TF32, or are
    float16: 2e-3; bfloat16: 2e-2. Source: the differences that benchmarks/splittability.py finds, with room.
    """
    precision = str(trainer.precision_plugin.precision)
    dtypes = {parameter.dtype for parameter in trainer.lightning_module.parameters()}
    if "bf16" in precision or torch.bfloat16 in dtypes:
        return _BFLOAT16
    if precision.startswith("16") or torch.float16 in dtypes:
        return 2e-3
    if dtypes == {torch.float64}:
        return 1e-6
    return 2e-3 if trainer.strategy.root_device.type == "cuda" else 1e-4


def _distance(one: Any, other: Tensor, scale: Tensor) -> float:
    distance = float((one - other).norm() / scale)
    return distance if distance == distance else float("inf")  # noqa: PLR0124  # NaN is far


def _along(difference: Tensor, terms: Sequence[Tensor], scale: Tensor) -> float:
    """Return how much of a difference other weights of the terms would make up for, relative to `scale`."""
    basis = torch.linalg.qr(torch.stack(list(terms), 1)).Q
    inside = float((basis.T @ difference).norm() / scale)
    return inside if inside == inside else float("inf")  # noqa: PLR0124  # NaN is far


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _declared(rules: MicroBatchRules) -> list[_Rule]:
    if rules.loss_is_sum:
        return [_Rule(name="loss_is_sum")]
    return [_Rule(name="loss_weight")] if rules.loss_weight is not None else []


def _rules(labels: Tensor | None) -> list[_Rule]:
    rules = [_Rule(name="rows")]
    if labels is not None:
        rules.append(_Rule(name="scored labels", per_row=_scored))
    if labels is not None and labels.dim() > 1:
        rules.append(_Rule(name="scored labels, shifted", per_row=lambda labels: _scored(labels[:, 1:])))
    return rules


def _labels_in(batch: Any, rows: int | None = None) -> Tensor | None:
    """Return the first integer tensor of one entry a row that is named as labels are, outer fields before inner ones."""
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        batch = batch._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(batch, Mapping):
        named = [batch[name] for name in _LABELS if name in batch]
        for value in named:
            whole = isinstance(value, Tensor) and value.dim() and not value.is_floating_point()
            if whole and rows in (None, value.shape[0]):
                return value
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    inner = (_labels_in(entry, rows) for entry in entries if not isinstance(entry, (str, bytes, Tensor)))
    return next((found for found in inner if found is not None), None)


def _scored(labels: Tensor) -> Tensor:
    return (labels != _IGNORED).reshape(len(labels), -1).sum(1)


def _telling_starts(labels: Tensor | None, rules: Sequence[_Rule], *, rows: int, unit: int) -> list[int]:
    """Return where the neighbouring units begin that one rule weighs most differently from the next."""
    if labels is None or len(rules) < 2:
        return []
    ones = torch.ones(rows, device=labels.device)
    by_rule = torch.stack([ones if rule.per_row is None else rule.per_row(labels) for rule in rules]).cpu().double()
    units = by_rule[:, : rows // unit * unit].unflatten(1, (-1, unit)).sum(2)
    left, right = units[:, :-1], units[:, 1:]
    shares = (left / (left + right)).where((left > 0) & (right > 0), torch.nan)
    starts = []
    for one, other in pairwise(shares):
        apart = (one - other).abs().nan_to_num(0.0)
        if float(apart.max()) > 1e-9:
            starts.append(unit * int(apart.argmax()))
    return starts
