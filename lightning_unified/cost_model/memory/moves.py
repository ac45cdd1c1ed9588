"""The allocations and frees of a step's trace, in the form that replays of an allocator need."""

from collections import defaultdict
from functools import cached_property

from lightning_unified.cost_model.trace.gradient_buffer import added_at_once
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work

__all__ = ["Move", "Moves"]

Move = tuple[int, int, Take | None]
"""Place in the step, storage, and the allocation; None for a free."""


class Moves:
    """The allocations and frees of a trace; made once for a trace.

    Attributes:
        first: Number of events before the step.
        setup: The storages that live before the step.
        step: The events of the step.
        takes: All allocations by storage.
        renewed: Storages of gradients that the first step's backward pass is the first to take.
        moves: The allocations and frees of the step in their order.
        beginnings: Storages that the first step is the first to take, by the event they precede.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        works = (index for index, event in enumerate(events) if isinstance(event, Work) and event.phase != "setup")
        self.first = next(works, len(events))
        self.setup = [event for event in events[: self.first] if isinstance(event, Take)]
        self.step = events[self.first :]
        self.takes = {event.storage: event for event in events if isinstance(event, Take)}
        freed = {event.storage for event in self.step if isinstance(event, Give)} if trace.replayed else None
        # gradients that come with the first step's backward pass; those of recorded graphs lie in a buffer that exists before
        self.renewed = {
            one.storage for one in self.setup if one.category == "gradients" and (freed is None or one.storage in freed)
        }
        self.moves: list[Move] = [
            (at, event.storage, event if isinstance(event, Take) else None)
            for at, event in enumerate(self.step)
            if not isinstance(event, Work)
        ]
        self._is_split = trace.num_micro_batches > 1 and not trace.replayed
        self.beginnings = self._beginnings()

    @classmethod
    def of(cls, trace: Trace) -> "Moves":
        """Return the moves of a trace."""
        if "moves" not in trace.kept:
            trace.kept["moves"] = cls(trace)
        return trace.kept["moves"]

    @cached_property
    def in_place(self) -> list[Move]:
        """The moves of a step that adds its gradients to the memory of those before.

        `step/loop/gradient_places.py` does that. They are `moves` if the step does not split its batch, does not free all gradients before its first backward pass, or trains shards.
        """
        freed = [at for at, storage, taken in self.moves if taken is None and storage in self.renewed]
        backward = next((at for at in range(len(self.step)) if self._phase(at) == "backward"), 0)
        shards = any(take.category == "gathered weights" for take in self.takes.values())
        if not self._is_split or shards or not freed or max(freed) > backward:
            return self.moves
        events = added_at_once(self.step, self.renewed)
        return [
            (at, event.storage, self.takes[event.storage] if isinstance(event, Take) else None)
            for at, event in events
            if not isinstance(event, Work)
        ]

    def _beginnings(self) -> dict[int, list[Take]]:
        """Return the storages that the first step is the first to take, by the event they precede.

        These are the optimizer's state and the workspaces of libraries.
        """
        works = [index for index, event in enumerate(self.step) if isinstance(event, Work)]
        found: dict[int, list[Take]] = defaultdict(list)
        for take in self.setup:
            if take.since is not None and take.since < len(works):
                after = range(works[take.since] + 1, len(self.step))
                found[next((at for at in after if not isinstance(self.step[at], Take)), len(self.step))].append(take)
        steps = next((at for at in works if self._phase(at) == "optimizer step"), None)
        if steps is not None:
            found[steps] += [take for take in self.setup if take.category == "optimizer state"]
        return found

    def _phase(self, at: int) -> str:
        event = self.step[at]
        return event.phase if isinstance(event, Work) else ""
