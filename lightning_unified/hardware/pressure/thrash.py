"""Thrashing told from the run's own steps: they take several times what they took, while memory is being moved about."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median

from lightning_unified.hardware.environment.mps import LOW
from lightning_unified.hardware.reading import Backend
from lightning_unified.units import MIB, format_bytes

__all__ = ["Thrash", "ThrashDetector"]

# Judgement. A GPU working set that is paged is 12 to 100 times slower (pocket-tts PR 255; 226 s a step on a Mac that swapped), and
# no honest step of the same shapes is three times slower three times in a row; even then it takes traffic or a gap to be thrashing.
_EARLY, _RECENT, _SLOWER = 8, 3, 3.0
_TRAFFIC = 4 * MIB  # bytes a second; less than what is pressure in itself, for here the steps bear witness too
_GAP_SHARE = 0.25
_KINDS = 32  # kinds of step remembered, the least recently seen goes first


@dataclass(frozen=True, kw_only=True, slots=True)
class Thrash:
    """What was found.

    Attributes:
        seconds: What the quickest of the last steps took.
        usual_seconds: What steps of its kind took.
        traffic_bytes_per_s: What went to swap or came back from the compressor meanwhile; None if that is not the sign.
        gap_bytes: What driver or allocator held beyond what tensors needed; None if that is not the sign.
    """

    seconds: float
    usual_seconds: float
    traffic_bytes_per_s: float | None
    gap_bytes: int | None

    @property
    def reason(self) -> str:
        """What was seen, for the trace and for people."""
        signs = []
        if self.traffic_bytes_per_s is not None:
            signs.append(f"{format_bytes(int(self.traffic_bytes_per_s))} a second go to swap or come back")
        if self.gap_bytes is not None:
            signs.append(f"{format_bytes(self.gap_bytes)} are held beyond what tensors need")
        return f"thrashing: steps take {self.seconds:.3g} s that took {self.usual_seconds:.3g} s, while {' and '.join(signs)}"

    def advice(self, backend: Backend) -> str:
        """Return the one message: what was seen, what it means, and what helps on `backend`, the cheapest first."""
        ways = ["closing other programs"] if self.traffic_bytes_per_s is not None else []
        ways.append("batches of one shape, or of a few (pad or bucket them)")
        if backend == "mps":
            ways.append(f"a lower {LOW}, set before Python starts, so that cached blocks go earlier")
        elif backend in {"cuda", "rocm"}:
            ways.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments")
        ways.append("a smaller budget or micro-batch (memory.budget, memory.micro_batch_size)")
        return (
            f"{self.reason[0].upper()}{self.reason[1:]}. The machine moves memory instead of computing.\n"
            f"What helps: {'; '.join(ways)}. Caches are cleared between batches while this lasts."
        )


@dataclass(kw_only=True, slots=True)
class _Kind:
    """The steps of one kind: the median of the first ones, or of any later block of as many that was quicker."""

    block: list[float] = field(default_factory=list)
    usual: float | None = None

    def note(self, seconds: float) -> None:
        self.block.append(seconds)
        if len(self.block) == _EARLY:
            self.usual = min(median(self.block), self.usual or math.inf)
            self.block.clear()


class ThrashDetector:
    """Compares each step with earlier ones of its kind, and the memory traffic with that of the first steps.

    Only the time between `begin` and `end` counts, so that validation, checkpoints and the wait for data are outside. Steps are
    compared with steps of the same kind only, so that a larger batch is not taken for a slow machine; a kind that was not seen
    eight times says nothing.

    Args:
        clock: Seconds, of a clock that only goes forward.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._slow: list[tuple[float, float, float | None]] = []
        self._traffic: list[float] = []
        self._gaps: list[float] = []

    def begin(self) -> None:
        """A training batch begins."""
        self._began = self._clock()

    def end(self, kind: Hashable, *, traffic: float | None, gap: int | None, room: int | None) -> Thrash | None:
        """A training batch ends: return what was found, again after each batch for as long as it lasts.

        Args:
            kind: What makes steps comparable: shapes and micro-batch size.
            traffic: Bytes a second that go to swap or come back from the compressor; None while unknown.
            gap: Bytes that driver or allocator hold beyond what tensors need; None where unknown.
            room: The budget, the measure of the gap; None where unknown.
        """
        if self._began is None:
            return None
        seconds, self._began = self._clock() - self._began, None
        usual = self._note(kind, seconds)
        traffic_was, gap_was = _first(self._traffic, traffic), _first(self._gaps, gap)
        if usual is None:
            return None
        if seconds < _SLOWER * usual:
            self._slow.clear()
            return None
        self._slow = [*self._slow[-(_RECENT - 1) :], (seconds, usual, traffic)]
        if len(self._slow) < _RECENT:
            return None
        flows = [flow for _, _, flow in self._slow if flow is not None]
        flow = median(flows) if flows else None
        moves = flow is not None and flow >= max(_TRAFFIC, 2 * (traffic_was or 0))
        gapes = gap is not None and room is not None and gap >= (gap_was or 0) + _GAP_SHARE * room
        if not (moves or gapes):
            return None
        slowest, then, _ = min(self._slow)
        return Thrash(
            seconds=slowest,
            usual_seconds=then,
            traffic_bytes_per_s=flow if moves else None,
            gap_bytes=gap if gapes else None,
        )

    def _note(self, kind: Hashable, seconds: float) -> float | None:
        """Return what steps of this kind took before this one, None if too few were seen."""
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        usual = known.usual
        known.note(seconds)
        return usual


def _first(early: list[float], value: float | None) -> float | None:
    """Keep `value` if it is one of the first; return the lowest of these, None if none is known."""
    if value is not None and len(early) < _EARLY:
        early.append(value)
    return min(early, default=None)
