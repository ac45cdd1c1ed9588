"""Detect thrashing from the run's own steps: they slow down while the system moves memory."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median

from lightning_unified.hardware.environment.mps import LOW
from lightning_unified.hardware.reading import Backend
from lightning_unified.units import MIB, format_bytes, format_duration

__all__ = ["Thrash", "ThrashDetector"]

# Judgement. A paged GPU working set is 12 to 100 times slower (pocket-tts PR 255; 226 s a step on a swapping Mac). No step of the
# same shapes is three times slower three times in a row without a cause; even then thrashing needs traffic or a gap as a second sign.
_EARLY, _RECENT, _SLOWER = 8, 3, 3.0
_TRAFFIC = 4 * MIB  # bytes a second; lower than the pressure threshold, because slow steps are a second sign
_GAP_SHARE = 0.25
_KINDS = 32  # kinds of step remembered; the least recently seen is dropped first


@dataclass(frozen=True, kw_only=True, slots=True)
class Thrash:
    """A finding of thrashing.

    Attributes:
        seconds: Seconds of the quickest of the last steps.
        usual_seconds: Usual seconds of steps of its kind.
        traffic_bytes_per_s: Bytes a second moved to swap or out of the compressor meanwhile; None if that is not the sign.
        gap_bytes: Bytes driver or allocator held beyond the need of tensors; None if that is not the sign.
    """

    seconds: float
    usual_seconds: float
    traffic_bytes_per_s: float | None
    gap_bytes: int | None

    @property
    def reason(self) -> str:
        """The finding in one line, for the event log and for people."""
        signs = []
        if self.traffic_bytes_per_s is not None:
            signs.append(f"{format_bytes(int(self.traffic_bytes_per_s))} a second go to swap or come back")
        if self.gap_bytes is not None:
            signs.append(f"{format_bytes(self.gap_bytes)} are held beyond the need of tensors")
        return f"thrashing: steps take {format_duration(self.seconds)} that took {format_duration(self.usual_seconds)}, while {' and '.join(signs)}"

    def advice(self, backend: Backend) -> str:
        """Return the warning: the finding, its meaning, and remedies on `backend` by rising cost."""
        remedies = ["closing other programs"] if self.traffic_bytes_per_s is not None else []
        remedies.append("batches of one shape, or of a few (pad or bucket them)")
        if backend == "mps":
            remedies.append(f"a lower {LOW}, set before Python starts, so that cached blocks are freed earlier")
        elif backend in {"cuda", "rocm"}:
            remedies.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments")
        remedies.append("a smaller budget or micro-batch (memory.budget, memory.micro_batch_size)")
        return (
            f"{self.reason[0].upper()}{self.reason[1:]}. The machine moves memory instead of computing.\n"
            f"What helps: {'; '.join(remedies)}. Caches are cleared between batches while this lasts."
        )


@dataclass(kw_only=True, slots=True)
class _Kind:
    """Step times of one kind: the median of its quickest block of steps."""

    block: list[float] = field(default_factory=list)
    usual: float | None = None

    def note(self, seconds: float) -> None:
        self.block.append(seconds)
        if len(self.block) == _EARLY:
            self.usual = min(median(self.block), self.usual or math.inf)
            self.block.clear()


class ThrashDetector:
    """Compare each step with earlier ones of its kind, and traffic with that of the first steps.

    Only the time between `begin` and `end` counts, so validation, checkpoints and waiting for data are excluded. Steps are
    compared with steps of the same kind only, so a larger batch is not mistaken for a slow machine. A kind seen fewer than
    eight times gives no finding.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._slow: list[tuple[float, float, float | None]] = []
        self._traffic: list[float] = []
        self._gaps: list[float] = []

    def begin(self) -> None:
        """Note the start of a training batch."""
        self._began = self._clock()

    def end(self, kind: Hashable, *, traffic: float | None, gap: int | None, room: int | None) -> Thrash | None:
        """Note the end of a training batch; return a finding, again after each batch while it lasts.

        Args:
            kind: Key of comparable steps: shapes and micro-batch size.
            traffic: Bytes a second moved to swap or out of the compressor; None if unknown.
            gap: Bytes driver or allocator hold beyond the need of tensors; None if unknown.
            room: The budget, against which the gap is measured; None if unknown.
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
        """Return the usual seconds of this kind before this step, None if too few were seen."""
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
