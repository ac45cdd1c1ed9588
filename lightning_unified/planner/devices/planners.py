"""The planners of one step in each layout of its devices."""

from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.planner.devices.group import DeviceGroup
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.search.phases import Phases
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import SizeLimits, StepTraces

__all__ = ["Planners"]


class Planners:
    """Makes and keeps the planner of a step in each layout of its devices.

    Args:
        step: The step on one device.
        group: The devices and the requested layout.
        limits: The micro-batch sizes that are allowed.
        phases: Shares the dry runs of the requested layout between the phases of a fit.
        calibration: Corrections from earlier steps, which hold for one device.

    Attributes:
        traces: The traces of the requested layout.
    """

    def __init__(
        self,
        step: StepSpec,
        group: DeviceGroup,
        limits: SizeLimits,
        *,
        phases: Phases,
        calibration: Calibration | None,
    ) -> None:
        self._step, self._limits = step, limits
        self._calibration = calibration if group.devices == 1 else None  # measured on one device
        self.traces = phases.traces(group.step(step), limits=limits, counted=group.counted(step.module))
        self._planners = {group: self._planner(group, self.traces)}

    def of(self, group: DeviceGroup) -> Planner:
        """Return the planner of a layout."""
        if group not in self._planners:
            counted = group.counted(self._step.module)
            traces = StepTraces(group.step(self._step), limits=self._limits, counted=counted)
            self._planners[group] = self._planner(group, traces)
        return self._planners[group]

    def _planner(self, group: DeviceGroup, traces: StepTraces) -> Planner:
        return Planner(traces, calibration=self._calibration, link=group.link)
