"""The speeds by which a run orders its plans: those that are kept, or as much of a measurement as the decision needs."""

from functools import cached_property

from lightning_unified.cost_model.rates import Rates, brief_rates, tabled_rates, typical_rates
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.step.recovery.budget_watch import BudgetWatch

__all__ = ["RunSpeeds"]


class RunSpeeds:
    """The speeds of the device that a run trains on.

    A run measures little, for its first step waits meanwhile: what no measurement has been kept of is taken from the tables, or timed in
    a tenth of a second, and not kept; `plan` measures a machine in full. What alignment gains is measured when a size is to be
    chosen that could be aligned, and kept.

    Args:
        watch: Of the device, here or simulated.
        calibration: What is kept of it.
        precision: That the run multiplies in, by Lightning's name.
    """

    def __init__(self, watch: BudgetWatch, calibration: Calibration, *, precision: str) -> None:
        self._watch, self._calibration, self._precision = watch, calibration, precision

    @cached_property
    def rates(self) -> Rates:
        """The speeds, each with where it comes from."""
        machine = self._watch.machine
        if machine is not None:
            return tabled_rates(machine.profile.name) or typical_rates(machine.profile.backend)
        half = {"bf": ["bfloat16"], "16": ["float16"]}.get(self._precision[:2], [])
        return self._calibration.rates or brief_rates(self._watch.device, name=self._watch.reading().name, dtypes=half)

    @property
    def lacks_alignment(self) -> bool:
        """Whether it is not known yet what aligned sizes gain, and can be measured."""
        return self._watch.machine is None and self._calibration.alignment is None

    def alignment_pays(self) -> bool:
        """Measure what aligned sizes gain, and return whether it is anything."""
        return self._calibration.gains(self._watch.device).multiple > 1

    def describe(self) -> str:
        """Return where the speeds come from, in words."""
        rates = self.rates
        if rates is self._calibration.rates:
            return f"of {rates.name}, measured before and kept"
        return f"of {rates.name}: arithmetic by {rates.sources['flops']}; an operation's start by {rates.sources['launch']}"
