"""`predict` and `plan`: a step's memory and time, and the fastest step that fits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning as L
import torch

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates import Rates, tabled_rates, typical_rates
from lightning_unified.errors import ConfigurationError, DryRunError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import KERNELS, recompute_policies
from lightning_unified.options.attention import AskedAttention, attention_choices, check_attention
from lightning_unified.options.compilation import AskedCompile, compiled_as
from lightning_unified.options.loss_chunk import AskedChunk, check_chunk, chunk_choices
from lightning_unified.planner.arguments import check_recompute, check_step_arguments
from lightning_unified.planner.chosen import chosen_plan
from lightning_unified.planner.devices import DeviceGroup, backend_of, budget_bytes, calibration_of, speeds_of
from lightning_unified.planner.devices.layouts import compared_layouts
from lightning_unified.planner.devices.planners import Planners
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.other_phases import plan_validation
from lightning_unified.planner.search.combinations import Combination, combinations_to_compare
from lightning_unified.planner.search.phases import Phases
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import SizeLimits, StepTraces

__all__ = ["plan", "plan_many", "predict"]

_UNALIGNED = "not measured, because the machine is not this one; no multiple of rows is preferred"
_ALL, _NONE = RecomputePolicy(blocks="all"), RecomputePolicy(blocks=0)


def predict(
    module: L.LightningModule,
    batch: Any,
    *,
    device: str | torch.device,
    micro_batch_size: int | None = None,
    optimizer_step: bool = True,
    precision: str = "32-true",
    recompute: RecomputePolicy | bool | None = None,
    optimizer_kernel: str | None = None,
    loss_chunk: int | None = None,
    attention: Literal["chunked"] | None = None,
    compile: AskedCompile = False,  # noqa: A002
    rates: Rates | None = None,
    trainer: L.Trainer | None = None,
    validation_batch: Any = None,
    devices: int = 1,
    strategy: Literal["ddp", "fsdp", "unified_ddp", "unified_fsdp"] | None = None,
    hold: Literal["auto", "parameters", "shards"] = "auto",
    link: str | float | None = None,
    optimizer_rollback: bool | None = None,
) -> Prediction:
    """Predict a training step's memory and time on a device, which need not be here.

    A dry run executes the real `training_step`, backward pass, optimizer and Lightning's loop on tensors without storage. Nothing is
    allocated or run on the device. Module, batch and random generators stay unchanged.

    Args:
        module: The module; its weights may be on any device, the meta device included (`with torch.device("meta"): ...`).
        batch: A whole batch as `training_step` gets it; only integer values matter.
        device: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"`, or a device of these types.
        micro_batch_size: Rows of a micro-batch; None for the whole batch.
        optimizer_step: Whether the step writes weights; if not, optimizer state and the optimizer's temporaries are left out.
        precision: Lightning's name.
        recompute: The blocks that recompute their activations: True for all, None for the module as it is.
        optimizer_kernel: `"fused"`, `"foreach"`, `"for-loop"`; None for the optimizer's own choice on that device.
        loss_chunk: Rows of logits that the chunked loss computes at a time, for Hugging Face models and modules that offer one.
        attention: `"chunked"` computes attention in chunks of queries; None leaves it to torch.
        compile: `"blocks"` or `"whole"` plans the graphs that a strategy with this option would compile; for one device.
        rates: The speeds of the machine; None predicts no seconds.
        trainer: The Trainer of the fit, with its callbacks, clipping and accumulation; None for a default Trainer.
        validation_batch: A whole batch as `validation_step` gets it, to predict `validation` too; None leaves that out.
        devices: The number of devices that train together, each with a batch as large as `batch`. The figures are those of one.
        strategy: For several devices, `"ddp"` or `"unified_ddp"` (a copy of the module on each), `"unified_fsdp"`, or `"fsdp"` (FSDP2
            alone, as Lightning's `ModelParallelStrategy` runs it: without scratch memory and copies for a recovery).
        hold: What a rank of `unified_fsdp` holds whole during a step, as `UnifiedFSDPStrategy` takes it; `"auto"` is `"parameters"` here.
        link: The link between the devices: a name such as `"nvlink4"`, or bytes a second; None for the published one.
        optimizer_rollback: Whether the strategy copies weights and optimizer state around each step; None for the strategy's default,
            which is true for `unified_fsdp` alone.

    Raises:
        DryRunError: If the step cannot be traced.
        ConfigurationError: If the device is not one of these, or the devices, the strategy or the link are not.
    """
    check_step_arguments(module, batch, micro_batch_size=micro_batch_size, trainer=trainer, rates=rates)
    check_recompute(recompute, others=(None,), policies=True)
    if attention not in (None, "chunked"):
        raise ConfigurationError(f'attention={attention!r}: give "chunked", or None for torch\'s.')
    if optimizer_kernel not in (None, *KERNELS):
        raise ConfigurationError(f"optimizer_kernel={optimizer_kernel!r}: give one of {', '.join(KERNELS)}, or None.")
    policy = _ALL if recompute is True else _NONE if recompute is False else recompute
    combination = Combination(
        precision=precision,
        recompute=policy,
        optimizer_kernel=optimizer_kernel,
        loss_chunk=loss_chunk,
        attention=attention,
    )
    backend, name = backend_of(device), "" if rates is None else rates.name
    group = DeviceGroup.of(devices, strategy=strategy, link=link, backend=backend, name=name)
    group = group.holding(hold, module, budget_bytes=None)
    step = StepSpec(
        module=module,
        batch=batch,
        backend=backend,
        precision=precision,
        trainer=trainer,
        optimizer_rollback=optimizer_rollback,
    )
    step = group.step(step)
    traces = StepTraces(step, counted=group.counted(module, updates=optimizer_step))
    with group.entered(), _compiled(module, compile, group):
        found = Planner(traces, rates=rates, link=group.link).predict(combination, micro_batch_size=micro_batch_size)
        found = group.in_prediction(found)
        if validation_batch is None:
            return found
        validation = plan_validation(
            _validation(step, validation_batch, loss_chunk=loss_chunk, attention=attention), limit=None
        )
    return replace(found, validation=validation.prediction)


def plan(
    module: L.LightningModule,
    batch: Any,
    *,
    budget: int | str,
    device: str | torch.device,
    micro_batch_size: int | None = None,
    precision: str = "32-true",
    recompute: bool | Literal["auto"] = "auto",
    optimizer_kernel: str = "keep",
    loss_chunk: AskedChunk = "auto",
    attention: AskedAttention = "auto",
    compile: AskedCompile = False,  # noqa: A002
    rates: Rates | None = None,
    trainer: L.Trainer | None = None,
    validation_batch: Any = None,
    phases: Phases | None = None,
    devices: int = 1,
    strategy: Literal["ddp", "fsdp", "unified_ddp", "unified_fsdp"] | None = None,
    hold: Literal["auto", "parameters", "shards"] = "auto",
    link: str | float | None = None,
    optimizer_rollback: bool | None = None,
) -> Plan:
    """Return the plan of least predicted step time that fits into `budget`.

    Args:
        module: As in `predict`.
        batch: As in `predict`.
        budget: Bytes, or a budget such as `"8GiB"`; for `"60%"` and `"auto"` the device must be here.
        device: As in `predict`.
        micro_batch_size: The largest micro-batch size allowed; None leaves it open.
        precision: Lightning's name.
        recompute: Whether all blocks recompute their activations; `"auto"` leaves it open.
        optimizer_kernel: `"keep"`, `"auto"` to leave it open, or a kernel's name.
        loss_chunk: Rows of logits that the loss computes at a time, `"auto"` to leave it open, or False for the module as it is.
        attention: `"torch"`, `"chunked"`, or `"auto"` to leave it open on MPS.
        compile: As in `predict`.
        rates: The speeds of another machine, such as `tabled_rates("m2-16gb")`. None measures a device of this machine once and keeps
            its speeds in the user's cache; measurements of earlier steps correct the predictions, as in a fit. For a device that
            is not here, None takes the published speeds of a typical one, which order plans but predict no times.
        trainer: As in `predict`.
        validation_batch: A whole batch as `validation_step` gets it; the plan then includes its micro-batches.
        phases: One object for the plans of all phases of a fit, as `Phases` describes it.
        devices: As in `predict`; the budget is that of one device.
        strategy: As in `predict`. The plan's `layouts` compare both strategies, with and without activation checkpointing.
        hold: As in `predict`; `"auto"` chooses by the budget, as the strategy does.
        link: As in `predict`.
        optimizer_rollback: As in `predict`.

    Returns:
        The plan. If nothing fits, its `prediction` and `micro_batch_size` are None, and `reasons["micro_batch_size"]` names plans that
        would fit a larger budget.

    Raises:
        DryRunError: If the step cannot be traced.
        ConfigurationError: If an argument is not one of these.
        BudgetError: If the budget cannot be parsed or the device does not have it.
    """
    check_step_arguments(module, batch, micro_batch_size=micro_batch_size, trainer=trainer, rates=rates)
    check_recompute(recompute, others=("auto",))
    check_chunk(loss_chunk)
    check_attention(attention)
    backend, count = backend_of(device), budget_bytes(budget, device)
    calibration = calibration_of(device) if rates is None else None
    known, speeds = speeds_of(device, rates=rates, calibration=calibration)
    group = DeviceGroup.of(devices, strategy=strategy, link=link, backend=backend, name=known.name)
    group = group.holding(hold, module, budget_bytes=count)
    step = StepSpec(
        module=module,
        batch=batch,
        backend=backend,
        precision=precision,
        trainer=trainer,
        optimizer_rollback=optimizer_rollback,
    )
    is_later = phases is not None and phases.has_first
    planners = Planners(
        step, group, SizeLimits(micro_batch_size=micro_batch_size), phases=phases or Phases(), calibration=calibration
    )
    with group.entered(), _compiled(module, compile, group) as compiled:
        combinations = _combinations(
            module,
            precision,
            recompute=recompute,
            optimizer_kernel=optimizer_kernel,
            loss_chunk=loss_chunk,
            attentions=attention_choices(module, attention, backend=backend),
        )
        planner = planners.of(group)
        chosen = partial(chosen_plan, planner, combinations, step, rates=known, budget_bytes=count)
        found = chosen(only_best=is_later)
        if is_later and (found.prediction is None or found.prediction.step_bytes > count):
            found = chosen(only_best=False)  # its page lists what would fit
        if group.strategy is not None:
            compared = [(str(one.strategy), one.hold or "", planners.of(one)) for one in group.layouts()]
            layouts = compared_layouts(
                compared, combinations[0], policies=recompute_policies(module), budget_bytes=count, rates=known
            )
            found = group.in_plan(found, layouts)
        alignment = None if calibration is None else calibration.alignment
        aligned = _UNALIGNED if alignment is None else alignment.describe()
        found = replace(found, reasons={**found.reasons, **compiled, "alignment": aligned, "speeds": speeds})
        if validation_batch is None:
            return found
        return _with_validation(found, group.step(step), validation_batch, planners.traces)


def plan_many(
    module: L.LightningModule,
    batch: Any,
    machines: Mapping[str, tuple[str, int, Rates | None]],
    *,
    micro_batch_size: int | None = None,
    precision: str = "32-true",
    recompute: bool | Literal["auto"] = "auto",
    optimizer_kernel: str = "keep",
    loss_chunk: AskedChunk = "auto",
    attention: AskedAttention = "auto",
    compile: AskedCompile = False,  # noqa: A002
    trainer: L.Trainer | None = None,
    devices: int = 1,
    strategy: str | None = None,
    hold: Literal["auto", "parameters", "shards"] = "auto",
    link: str | float | None = None,
    optimizer_rollback: bool | None = None,
) -> dict[str, Plan]:
    """Return a plan for each machine; machines of one backend share their dry runs.

    `machines` maps a name to the backend, the budget in bytes and the speeds. None takes the published speeds of the machine, or of
    a typical one of its backend. The other arguments are those of `plan`.

    Raises:
        DryRunError: If the step cannot be traced.
    """
    check_attention(attention)
    options: dict[str, Any] = {"recompute": recompute, "optimizer_kernel": optimizer_kernel, "loss_chunk": loss_chunk}
    traces: dict[tuple[str, str | None], StepTraces] = {}
    limits, plans = SizeLimits(micro_batch_size=micro_batch_size), {}
    for name, (backend, count, rates) in machines.items():
        known = rates or tabled_rates(name) or typical_rates(backend)
        group = DeviceGroup.of(devices, strategy=strategy, link=link, backend=backend_of(backend), name=known.name)
        group = group.holding(hold, module, budget_bytes=count)
        key = backend, group.hold
        step = StepSpec(
            module=module,
            batch=batch,
            backend=backend_of(backend),
            precision=precision,
            trainer=trainer,
            optimizer_rollback=optimizer_rollback,
        )
        if key not in traces:
            traces[key] = StepTraces(group.step(step), limits=limits, counted=group.counted(module))
        planner = Planner(traces[key], link=group.link)
        attentions = attention_choices(module, attention, backend=backend_of(backend))
        with group.entered(), _compiled(module, compile, group):
            combinations = _combinations(module, precision, attentions=attentions, **options)
            found = chosen_plan(planner, combinations, step, rates=known, budget_bytes=count)
        plans[name] = group.in_plan(found)
    return plans


@contextmanager
def _compiled(module: L.LightningModule, asked: AskedCompile, group: DeviceGroup) -> Iterator[dict[str, str]]:
    """Compile the module for the plans made inside; yield the reason for a plan."""
    if asked is not False and group.devices > 1:
        raise ConfigurationError(
            f"compile={asked!r}: plans for several devices are made for the module as it is; give compile=False (memory.compile=false)."
        )
    with compiled_as(module, asked) as reason:
        yield {} if asked is False else {"compile": reason}


def _combinations(
    module: L.LightningModule,
    precision: str,
    *,
    recompute: bool | Literal["auto"],
    optimizer_kernel: str,
    loss_chunk: AskedChunk,
    attentions: Sequence[str | None],
) -> list[Combination]:
    check_chunk(loss_chunk)
    if optimizer_kernel not in ("keep", "auto", *KERNELS):
        raise ConfigurationError(
            f"optimizer_kernel={optimizer_kernel!r} is not offered; choose from keep, auto, {', '.join(KERNELS)}."
        )
    policies = recompute_policies(module) if recompute == "auto" else (_ALL if recompute else _NONE,)
    kernels = KERNELS if optimizer_kernel == "auto" else ()
    found = combinations_to_compare(
        precision,
        policies=policies,
        kernels=kernels,
        chunks=chunk_choices(module, loss_chunk),
        attentions=attentions,
    )
    if optimizer_kernel in KERNELS:
        found = [replace(combination, optimizer_kernel=optimizer_kernel) for combination in found]
    return found


def _validation(step: StepSpec, batch: Any, *, loss_chunk: int | None, attention: str | None) -> StepSpec:
    """Return the validation step on `batch` in the fit of a training step."""
    options = {"loss_chunk": loss_chunk, "attention": attention}
    return replace(step, batch=batch, train_batch=step.batch, accumulate=1, validates=True, **options)


def _with_validation(found: Plan, step: StepSpec, batch: Any, traces: StepTraces) -> Plan:
    """Add the prediction for the validation step on `batch`, or the reason why there is none."""
    if found.prediction is None:
        return found
    try:
        validates = _validation(step, batch, loss_chunk=found.loss_chunk, attention=found.attention)
        blocks = traces.known.twins_of(found.precision, found.attention)
        validation = plan_validation(validates, limit=found.budget_bytes, twins=blocks, state=traces.known.state)
    except DryRunError as error:
        return replace(found, reasons={**found.reasons, "validation": f"not predicted: {error}"})
    prediction = replace(found.prediction, validation=validation.prediction)
    return replace(found, prediction=prediction, reasons={**found.reasons, "validation": validation.reason})
