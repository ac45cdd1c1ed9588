"""Predictions and plans for Python: what a step of a module needs on a device, and the best way to run it there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates import Rates, tabled_rates
from lightning_unified.cost_model.rates.calibration import Calibration, machine_key
from lightning_unified.cost_model.search import Choice
from lightning_unified.errors import ConfigurationError, DryRunError
from lightning_unified.hardware import parse_spec, read, resolve_budget
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import KERNELS, recompute_policies
from lightning_unified.options.loss_chunk import chunk_choices
from lightning_unified.planner.other_phases import plan_validation, with_generation
from lightning_unified.planner.planner import CountedMemory, Planner, SizeLimits
from lightning_unified.planner.settings import Setting, settings_to_compare

__all__ = ["plan", "plan_many", "predict"]

_BACKENDS = ("cpu", "cuda", "rocm", "mps")
_UNALIGNED = "not measured, for the machine is not this one; no size is preferred for being a multiple of something"
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
    rates: Rates | None = None,
    trainer: L.Trainer | None = None,
    validation_batch: Any = None,
) -> Prediction:
    """Return what a training step of `module` takes on `device`, which need not be here; nothing is allocated or run.

    The step is traced with tensors that have shapes and no values: the real `training_step`, backward pass, optimizer and Lightning's
    loop around them. Module, batch and random generators are left as they are.

    Args:
        module: Its weights may be anywhere, also on the meta device (`with torch.device("meta"): ...`).
        batch: A whole batch as `training_step` gets it; its values matter only where they are whole numbers.
        device: `"cpu"`, `"cuda"`, `"rocm"`, `"mps"`, or a device of these.
        micro_batch_size: Rows at once; None for the whole batch.
        optimizer_step: Whether weights are written in the step. Without it neither optimizer state nor temporaries are counted.
        precision: Lightning's name.
        recompute: What is recomputed in the backward pass: True for all blocks, None for the module as it is.
        optimizer_kernel: `"fused"`, `"foreach"`, `"for-loop"`; None for what the optimizer would run on that device.
        loss_chunk: Rows of logits at once, for a module that offers it.
        rates: Speeds of the machine, for the predicted seconds; None leaves them unknown.
        trainer: The Trainer that it is about, with its callbacks, clipping and accumulation; None for a plain one.
        validation_batch: A whole batch as `validation_step` gets it, for `validation` of what is returned; None leaves that out.

    Raises:
        DryRunError: If the step cannot be traced.
        ConfigurationError: If the device is none of those named.
    """
    policy = _ALL if recompute is True else _NONE if recompute is False else recompute
    setting = Setting(precision=precision, recompute=policy, optimizer_kernel=optimizer_kernel, loss_chunk=loss_chunk)
    planner = Planner(
        module,
        batch,
        backend=_backend(device),
        trainer=trainer,
        rates=rates,
        counted=CountedMemory(updates=optimizer_step),
    )
    found = planner.predict(setting, micro_batch_size=micro_batch_size)
    if validation_batch is None:
        return found
    foreseen = plan_validation(
        module,
        validation_batch,
        backend=planner.backend,
        precision=precision,
        limit=None,
        trainer=trainer,
        train_batch=batch,
        loss_chunk=loss_chunk,
    )
    return replace(found, validation=foreseen.prediction)


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
    rates: Rates | None = None,
    trainer: L.Trainer | None = None,
    validation_batch: Any = None,
) -> Plan:
    """Return the plan of least predicted step time that fits into `budget`.

    Args:
        module: As in `predict`.
        batch: As in `predict`.
        budget: Bytes, or a budget as it is written elsewhere: `"8GiB"`; `"60%"` and `"auto"` are of the device's pool, which must be here.
        device: As in `predict`.
        micro_batch_size: The largest number of rows at once; None leaves it open.
        precision: Lightning's name.
        recompute: Whether everything is recomputed; `"auto"` leaves it open.
        optimizer_kernel: `"keep"`, `"auto"` to leave it open, or a kernel's name.
        rates: Speeds of a machine that is not this one. None is this one: its speeds are measured once, kept in the user's cache, and
            predictions corrected by what its steps have taken before, as a fit's are.
        trainer: As in `predict`.
        validation_batch: A whole batch as `validation_step` gets it: the plan then says in how many parts it goes through.

    Returns:
        The plan; its `prediction` is None, and its `micro_batch_size` too, where nothing fits, and `reasons["micro_batch_size"]` says
        what would.

    Raises:
        DryRunError: If the step cannot be traced.
        ConfigurationError: If an argument is none of those named.
        BudgetError: If the budget cannot be read or had.
    """
    backend = _backend(device)
    count = budget if isinstance(budget, int) else _bytes_of(budget, device)
    calibration = _calibration(device) if rates is None else None
    planner = Planner(
        module,
        batch,
        backend=backend,
        trainer=trainer,
        limits=SizeLimits(micro_batch_size=micro_batch_size),
        calibration=calibration,
    )
    settings = _settings(module, precision, recompute=recompute, optimizer_kernel=optimizer_kernel)
    known = rates if calibration is None else calibration.rates
    assert known is not None
    choice = planner.choose(settings, budget_bytes=count, rates=known)
    found = _with_generation(_plan(planner, choice, precision=precision, budget_bytes=count), module, batch)
    alignment = None if calibration is None else calibration.alignment
    told = _UNALIGNED if alignment is None else alignment.describe()
    found = replace(found, reasons={**found.reasons, "alignment": told})
    if validation_batch is None or found.prediction is None:
        return found
    return _with_validation(found, module, validation_batch, backend=backend, trainer=trainer, train_batch=batch)


def plan_many(
    module: L.LightningModule,
    batch: Any,
    machines: Mapping[str, tuple[str, int, Rates | None]],
    *,
    micro_batch_size: int | None = None,
    precision: str = "32-true",
    recompute: bool | Literal["auto"] = "auto",
    optimizer_kernel: str = "keep",
    trainer: L.Trainer | None = None,
) -> dict[str, Plan]:
    """Return the plan of each machine; machines of one backend share their dry runs.

    Args:
        module: As in `predict`.
        batch: As in `predict`.
        machines: By name: its backend, its budget in bytes, and its speeds; without speeds, those tabled under that name.
        micro_batch_size: As in `plan`.
        precision: As in `plan`.
        recompute: As in `plan`.
        optimizer_kernel: As in `plan`.
        trainer: As in `predict`.

    Raises:
        DryRunError: If the step cannot be traced.
        ConfigurationError: If there is nothing in the tables about a machine without speeds.
    """
    settings = _settings(module, precision, recompute=recompute, optimizer_kernel=optimizer_kernel)
    planners: dict[str, Planner] = {}
    plans = {}
    for name, (backend, count, rates) in machines.items():
        if backend not in planners:
            planners[backend] = Planner(
                module,
                batch,
                backend=_backend(backend),
                trainer=trainer,
                limits=SizeLimits(micro_batch_size=micro_batch_size),
            )
        planner = planners[backend]
        known = rates or tabled_rates(name)
        if known is None:
            raise ConfigurationError(f"nothing is tabled about the speed of {name!r}; give its rates.")
        choice = planner.choose(settings, budget_bytes=count, rates=known)
        found = _plan(planner, choice, precision=precision, budget_bytes=count)
        plans[name] = _with_generation(found, module, batch)
    return plans


def _settings(
    module: L.LightningModule, precision: str, *, recompute: bool | Literal["auto"], optimizer_kernel: str
) -> list[Setting]:
    if optimizer_kernel not in ("keep", "auto", *KERNELS):
        raise ConfigurationError(
            f"optimizer_kernel={optimizer_kernel!r} is not offered; choose from keep, auto, {', '.join(KERNELS)}."
        )
    policies = recompute_policies(module) if recompute == "auto" else (_ALL if recompute else _NONE,)
    kernels = KERNELS if optimizer_kernel == "auto" else ()
    found = settings_to_compare(precision, policies=policies, kernels=kernels, chunks=chunk_choices(module))
    if optimizer_kernel in KERNELS:
        found = [replace(setting, optimizer_kernel=optimizer_kernel) for setting in found]
    return found


def _plan(planner: Planner, choice: Choice, *, precision: str, budget_bytes: int) -> Plan:
    best = choice.best
    if best is None:
        return Plan(
            micro_batch_size=None,
            recompute=None,
            precision=precision,
            budget_bytes=budget_bytes,
            alternatives=choice.alternatives,
            reasons={"micro_batch_size": choice.reason},
        )
    setting = planner.setting_of(best)
    return Plan(
        micro_batch_size=best.micro_batch_size,
        recompute=setting.recompute is not None and setting.recompute.blocks != 0,
        recomputed=best.recompute,
        precision=precision,
        optimizer_kernel=best.optimizer_kernel,
        loss_chunk=best.loss_chunk,
        budget_bytes=budget_bytes,
        prediction=planner.prediction_of(best),
        alternatives=choice.alternatives,
        reasons={"micro_batch_size": choice.reason},
    )


def _with_generation(found: Plan, module: L.LightningModule, batch: Any) -> Plan:
    """Return the plan with what is generated before its step."""
    if found.prediction is None:
        return found
    prediction, reason = with_generation(found.prediction, module, batch, precision=found.precision)
    reasons = {**found.reasons, **({"generation": reason} if reason else {})}
    return replace(found, prediction=prediction, reasons=reasons)


def _with_validation(
    found: Plan, module: L.LightningModule, batch: Any, *, backend: str, trainer: L.Trainer | None, train_batch: Any
) -> Plan:
    """Return the plan with what the validation step takes under it; why not, where that cannot be traced."""
    assert found.prediction is not None
    try:
        foreseen = plan_validation(
            module,
            batch,
            backend=backend,
            precision=found.precision,
            limit=found.budget_bytes,
            trainer=trainer,
            train_batch=train_batch,
            loss_chunk=found.loss_chunk,
        )
    except DryRunError as error:
        return replace(found, reasons={**found.reasons, "validation": f"not predicted: {error}"})
    prediction = replace(found.prediction, validation=foreseen.prediction)
    return replace(found, prediction=prediction, reasons={**found.reasons, "validation": foreseen.reason})


def _backend(device: str | torch.device) -> str:
    name = str(device).partition(":")[0]
    if name not in _BACKENDS:
        raise ConfigurationError(f"device={str(device)!r}: steps are predicted for {', '.join(_BACKENDS)}.")
    return "rocm" if name == "cuda" and torch.version.hip else name


def _bytes_of(spec: str, device: str | torch.device) -> int:
    written = parse_spec(spec)
    if written.kind == "bytes":
        return int(written.amount)
    return resolve_budget(spec, read(_real(device))).bytes


def _real(device: str | torch.device) -> torch.device:
    return torch.device(str(device).replace("rocm", "cuda"))


def _calibration(device: str | torch.device) -> Calibration:
    """Return what is known of the device, its speeds and what alignment gains among it; measured now if they never were.

    Raises:
        ConfigurationError: If the device is not here.
    """
    real = _real(device)
    here = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(real.type, lambda: True)()
    if not here:
        raise ConfigurationError(
            f"{device} is not here, so its speed cannot be measured; give rates, such as tabled_rates('m2-16gb')."
        )
    now = read(real)
    known = Calibration.load(machine_key(device=now.name, total_bytes=now.total.bytes, torch_version=torch.__version__))
    known.speeds(real)
    return known
