"""The phases of one fit, whose plans share their dry runs."""

from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.search.step_traces import CountedMemory, KnownModule, SizeLimits, StepTraces

__all__ = ["Phases"]


class Phases:
    """The phases of a fit, e.g. imitation and reinforcement: one module, several kinds of batch.

    The dry runs of later phases skip the repeated blocks that those of the first one found. A later phase that fits gets the plan that its
    fit chooses: only settings that can win are traced, so its plan lists fewer alternatives.
    """

    def __init__(self) -> None:
        self._known: KnownModule | None = None

    @property
    def has_first(self) -> bool:
        """Whether a phase was planned before."""
        return self._known is not None

    def traces(self, step: StepSpec, *, limits: SizeLimits, counted: CountedMemory | None = None) -> StepTraces:
        """Return the traces of the next phase.

        Args:
            step: The phase's step, of the same module and Trainer as the phases before.
            limits: The micro-batch sizes that are allowed.
            counted: The memory to count beside the tensors of a step.
        """
        found = StepTraces(step, limits=limits, counted=counted, like=self._known)
        self._known = self._known or found.known
        return found
