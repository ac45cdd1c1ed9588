"""Read the inputs of the decision from a run: memory options, speeds, and the planner."""

import math
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import lightning as L

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates import Rates, brief_rates, tabled_rates, typical_rates
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.cost_model.rates.links import Link
from lightning_unified.cost_model.search import Choice
from lightning_unified.options import CompileCost
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.first_batch.decide import StepInputs, needs_search
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.other_phases import outline
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.planner.search.combinations import Combination, combinations_to_compare
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import CountedMemory, SizeLimits, StepTraces
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_bytes

__all__ = ["RunSpeeds", "compile_cost", "gather_inputs", "open_combinations", "planner_of"]


def planner_of(
    trainer: L.Trainer,
    policy: MemoryPolicy,
    batch: Any,
    shape: BatchShape | None,
    *,
    calibration: Calibration | None,
    budget: StepBudget,
    obstacle: str = "",
    rates: Rates | None = None,
    sharding: Sharding | None = None,
    link: Link | None = None,
) -> Planner:
    """Return the planner of a batch, within the sizes that the policy allows.

    It predicts seconds if it gets `rates`. A batch with an `obstacle` runs whole. `sharding` and `link` are those of a sharded fit.
    """
    watch, light = policy.watch, outline(batch)
    step = StepSpec(
        module=trainer.lightning_module,
        batch=batch if light is None else light,  # a dry run keeps its batch alive until garbage is collected
        is_prepared=True,
        backend=watch.reading().backend,
        trainer=trainer,
        compiled=watch.machine is None,
        sharding=sharding,
    )
    limits = SizeLimits(
        unit=None if shape is None or not obstacle else shape.rows,
        least=policy.sizes.least,
        micro_batch_size=policy.sizes.max_micro_batch_size,
    )
    counted = CountedMemory(
        workspaces=watch.machine is None,
        reduction_bytes=0 if sharding is not None else budget.reduction_bytes,  # its dry run allocates them
        allocator=watch.allocator,
    )
    return Planner(StepTraces(step, limits=limits, counted=counted), rates=rates, calibration=calibration, link=link)


def gather_inputs(
    planner: Planner,
    combinations: tuple[Combination, ...],
    own: Prediction,
    budget: StepBudget,
    *,
    policy: MemoryPolicy,
    speeds: "RunSpeeds",
    rows: int | None,
    obstacle: str,
    module: str,
    room: float = 0.0,
) -> StepInputs:
    """Return the inputs of the decision, with the result of a search where one is needed.

    Args:
        planner: The planner of the batch.
        combinations: The combinations of memory options to compare, the user's own first.
        own: The prediction for the step as the user set it.
        budget: The bytes of the step.
        policy: The policy that the plan will be applied to.
        speeds: The speeds of the machine.
        rows: Rows of the batch; None if unknown.
        obstacle: Why the batch cannot be split; empty if it can.
        module: The name of the module's class.
        room: The share of these bytes that a search leaves for longer rows, if a plan fits beside it.
    """
    limit = budget.left
    own_fits = planner.fits(combinations[0], micro_batch_size=own.rows, limit=limit)
    if not own_fits and planner.may_expand(limit=limit) and budget.expand_segments():
        planner.expand_segments()
        limit = budget.left
    inputs = StepInputs(
        combinations=combinations,
        own=own,
        own_fits=own_fits,
        budget_bytes=limit,
        beside_bytes=budget.beside,
        rows=rows,
        micro_batch_size=policy.sizes.max_micro_batch_size,
        module=module,
        may_try=not budget.kept_bytes,
        obstacle=obstacle,
    )
    if not needs_search(inputs):
        return inputs
    choice = _with_room(planner, inputs, speeds, share=room)
    found = (planner.combination_of(one) for one in (choice.best, *choice.alternatives) if one is not None)
    return replace(inputs, choice=choice, combinations=tuple(dict.fromkeys((*combinations, *found))))


def _with_room(planner: Planner, inputs: StepInputs, speeds: "RunSpeeds", *, share: float) -> Choice:
    """Search for a plan that leaves a share of the budget for longer rows; without one, for any plan."""
    left = int(share * inputs.budget_bytes)
    if left:
        choice = _searched(planner, replace(inputs, budget_bytes=inputs.budget_bytes - left), speeds)
        if choice.best is not None:
            return replace(choice, reason=f"{choice.reason}; {format_bytes(left)} are left for longer rows")
    return _searched(planner, inputs, speeds)


def _searched(planner: Planner, inputs: StepInputs, speeds: "RunSpeeds") -> Choice:
    """Search; once more with the gain of aligned sizes where it could matter.

    The second search reuses the dry runs.
    """
    choose = partial(
        planner.choose, inputs.combinations, budget_bytes=inputs.budget_bytes, rates=speeds.rates, only_best=True
    )
    choice = choose()
    if speeds.lacks_alignment and planner.could_be_aligned(choice) and speeds.alignment_pays():
        return choose()
    return choice


def compile_cost(trainer: L.Trainer, policy: MemoryPolicy, *, step_seconds: float | None) -> CompileCost:
    """Return the figures that decide whether this fit compiles its blocks."""
    steps = trainer.estimated_stepping_batches
    return CompileCost(
        device=policy.watch.reading().backend,
        step_seconds=step_seconds,
        steps=None if math.isinf(steps) or steps < 0 else int(steps) - trainer.global_step,
    )


def open_combinations(trainer: L.Trainer, policy: MemoryPolicy, *, precision: str) -> list[Combination]:
    """Return the combinations of memory options that the user left open, the user's own first."""
    now, choices = policy.recomputation.policy, policy.recomputation.choices()
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    return combinations_to_compare(
        precision,
        # an earlier run, or shorter rows, needed full recomputation: less of it is not tried
        policies=choices[-1:] if now is not None and now.everything else choices,
        kernels=policy.applied_options.kernel_choices(scaled=scaled),
        chunks=policy.applied_options.chunk_choices(),
        attentions=policy.applied_options.attention_choices(policy.watch.reading().backend),
    )


class RunSpeeds:
    """The speeds of the device that a run trains on, by which it orders its plans.

    A run measures little, because its first step waits meanwhile. Speeds without a kept measurement come from tables, or from a timing
    of a tenth of a second that is not kept; the `plan` command measures a machine in full. The gain of aligned sizes is measured when a
    batch could be split into such sizes, and kept.

    Args:
        precision: Lightning's name of the precision in which the run multiplies matrices.
    """

    def __init__(self, watch: BudgetWatch, calibration: Calibration, *, precision: str) -> None:
        self._watch, self._calibration, self._precision = watch, calibration, precision

    @cached_property
    def rates(self) -> Rates:
        """The speeds, each with its source."""
        machine = self._watch.machine
        if machine is not None:
            return tabled_rates(machine.profile.name) or typical_rates(machine.profile.backend)
        half = {"bf": ["bfloat16"], "16": ["float16"]}.get(self._precision[:2], [])
        return self._calibration.rates or brief_rates(self._watch.device, name=self._watch.reading().name, dtypes=half)

    @property
    def lacks_alignment(self) -> bool:
        """Whether the gain of aligned sizes is unknown and can be measured."""
        return self._watch.machine is None and self._calibration.alignment is None

    def alignment_pays(self) -> bool:
        """Measure the gain of aligned sizes, and return whether there is one."""
        return self._calibration.gains(self._watch.device).multiple > 1

    def describe(self) -> str:
        """Return the sources of the speeds in words."""
        rates = self.rates
        if rates is self._calibration.rates:
            return f"of {rates.name}, measured before and kept"
        return f"of {rates.name}: arithmetic by {rates.sources['flops']}; an operation's start by {rates.sources['launch']}"
