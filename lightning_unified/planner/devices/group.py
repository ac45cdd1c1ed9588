"""Several devices that train one module together, seen from one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import lightning as L

from lightning_unified.cost_model.plan import Layout, Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates.links import Link, link_of, tabled_link
from lightning_unified.errors import ConfigurationError
from lightning_unified.planner.devices.layouts import why_layout
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.ranks.fake_group import fake_group
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.planner.search.step_traces import CountedMemory
from lightning_unified.step.ranks.reduction import scratch_bytes_of
from lightning_unified.step.sharding.shards import bytes_of_whole

__all__ = ["DeviceGroup"]

_NAMES = {"ddp": "unified_ddp", "fsdp": "fsdp", "unified_ddp": "unified_ddp", "unified_fsdp": "unified_fsdp"}
_BATCH = "one rank of {devices} with {strategy}: each has a batch of its own, as large as the one planned"
_HELD = {
    "parameters": 'hold="parameters": whole parameters and gradients during a step, gathered and reduced once',
    "shards": 'hold="shards": one block at a time is whole, gathered and reduced for every micro-batch',
}
_NOT_COUNTED = "memory that NCCL or RCCL takes for its own buffers is not counted; torch's allocator does not see it"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """The devices of a step, each a rank with a batch of its own.

    Attributes:
        devices: Their number.
        strategy: `"unified_ddp"`, `"unified_fsdp"` or `"fsdp"`; None for one device.
        hold: What a rank of `unified_fsdp` holds whole during a step: `"parameters"` or `"shards"`; None for other strategies.
        link: The link between them; None for one device.
    """

    devices: int = 1
    strategy: str | None = None
    hold: Literal["parameters", "shards"] | None = None
    link: Link | None = None

    @classmethod
    def of(
        cls, devices: int, *, strategy: str | None, link: str | float | None, backend: str, name: str = ""
    ) -> "DeviceGroup":
        """Return the group that a caller describes.

        Args:
            devices: The number of devices.
            strategy: `"unified_ddp"` (or `"ddp"`), `"unified_fsdp"` or `"fsdp"`; None for one device.
            link: A link's name, or bytes a second; None for the published link of the device.
            backend: The backend of the devices.
            name: The device's name, if known.

        Raises:
            ConfigurationError: If an argument is not one of these.
        """
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ConfigurationError(f"devices={devices!r}: give the number of devices, 1 or more.")
        if strategy is not None and (not isinstance(strategy, str) or strategy not in _NAMES):
            raise ConfigurationError(f"strategy={strategy!r}: give one of {', '.join(_NAMES)}, or None for one device.")
        known = None if link is None else link_of(link)
        if devices == 1:
            return cls()
        if strategy is None:
            raise ConfigurationError(
                f'devices={devices} needs a strategy: give strategy="ddp" for a copy of the module on each, or "fsdp" to shard it.'
            )
        if backend == "mps":
            raise ConfigurationError(
                f'devices={devices}: Lightning trains on one device of type "mps"; give devices=1.'
            )
        return cls(devices=devices, strategy=_NAMES[strategy], link=known or tabled_link(backend, name=name))

    def holding(self, hold: str, module: L.LightningModule, *, budget_bytes: int | None) -> "DeviceGroup":
        """Return the group with what its ranks hold whole, as `UnifiedFSDPStrategy` chooses it.

        Args:
            hold: `"auto"`, `"parameters"` or `"shards"`.
            module: The module.
            budget_bytes: Bytes that a device may use; None for no limit.

        Raises:
            ConfigurationError: If `hold` is not one of these.
        """
        if hold not in ("auto", "parameters", "shards"):
            raise ConfigurationError(f'hold={hold!r}: give "auto", "parameters" or "shards".')
        if self.strategy != "unified_fsdp":
            return self
        if hold == "auto":
            fits = budget_bytes is None or bytes_of_whole(module, ranks=self.devices) <= budget_bytes
            hold = "parameters" if fits else "shards"
        return replace(self, hold="parameters" if hold == "parameters" else "shards")

    def layouts(self) -> tuple["DeviceGroup", ...]:
        """Return the ways in which these devices can train a module together."""
        whole, shards = (replace(self, strategy="unified_fsdp", hold=hold) for hold in ("parameters", "shards"))
        return replace(self, strategy="unified_ddp", hold=None), whole, shards

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this process be one of the ranks inside the block, for dry runs of sharded steps.

        Raises:
            ConfigurationError: If this process is one of another number of ranks already.
        """
        if self.devices == 1:
            yield
            return
        with fake_group(self.devices):
            yield

    def step(self, step: StepSpec) -> StepSpec:
        """Return a step of one of the ranks."""
        if self.strategy not in ("fsdp", "unified_fsdp"):
            return step
        rollback = step.optimizer_rollback if self.strategy == "unified_fsdp" else False
        sharding = Sharding(devices=self.devices, hold=self.hold)
        return replace(step, sharding=sharding, optimizer_rollback=rollback)

    def counted(self, module: L.LightningModule, *, updates: bool = True) -> CountedMemory:
        """Return the memory and the collectives to count beside the tensors of a step."""
        if self.strategy != "unified_ddp":
            return CountedMemory(updates=updates)
        scratch = scratch_bytes_of([*module.parameters(), *module.buffers()])
        return CountedMemory(updates=updates, reduction_bytes=scratch, reducing_ranks=self.devices)

    def in_prediction(self, found: Prediction) -> Prediction:
        """Return a prediction that names the devices."""
        if self.strategy is None:
            return found
        held = () if self.hold is None else (_HELD[self.hold],)
        notes = (_BATCH.format(devices=self.devices, strategy=self.strategy), _NOT_COUNTED)
        return replace(found, devices=self.devices, strategy=self.strategy, notes=(*found.notes, *notes, *held))

    def in_plan(self, found: Plan, layouts: tuple[Layout, ...] = ()) -> Plan:
        """Return a plan that names the devices and the link, and compares the layouts."""
        if self.strategy is None or self.link is None:
            return found
        prediction = None if found.prediction is None else self.in_prediction(found.prediction)
        reasons = {**found.reasons, "link": f"{self.link.describe()}; {self.link.source}"}
        if layouts:
            reasons["strategy"] = why_layout(layouts, strategy=self.strategy, hold=self.hold or "")
        return replace(
            found,
            devices=self.devices,
            strategy=self.strategy,
            hold=self.hold or "",
            layouts=layouts,
            prediction=prediction,
            reasons=reasons,
        )
