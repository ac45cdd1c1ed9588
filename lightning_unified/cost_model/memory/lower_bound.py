"""What a step takes at least, told from a trace of the same step with more rows, or with nothing recomputed."""

from collections.abc import Collection, Mapping

from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work

__all__ = ["is_within", "least_bytes"]

_WHATEVER_ROWS = ("weights", "gradients", "optimizer state", "buffers", "callbacks", "batch")
"""Categories that take the same however the batch is cut; the batch waits on the device."""

_Living = Mapping[int, tuple[Take, str]]


def least_bytes(trace: Trace, rows: int, *, without: Collection[str] = (), only: Collection[str] | None = None) -> int:
    """Return what a step of micro-batches of `rows` takes at least, told from one of more rows.

    What lives at its peak lives in the smaller step too, in that instant. Whatever grows with the rows is on a straight line that
    begins at nothing or above, so the smaller step has its share of it or more; the rest does not change.

    Args:
        trace: Of no fewer rows, with all of the batch in it.
        rows: Of the smallest micro-batch that matters.
        without: Names of modules of which nothing need live that they made.
        only: Names of modules that run as in `trace`, where others, such as the loss, do not: of these activations are counted, and
            nothing else; None if all run so.
    """
    fixed = grows = 0
    for take, place in _at_peak(trace).values():
        if take.category in _WHATEVER_ROWS:
            fixed += take.bytes
        elif is_within(place, without):
            continue
        elif only is None or take.category == "activations" or is_within(place, only):
            grows += take.bytes
    return fixed + int(grows * min(rows / trace.rows, 1.0))


def is_within(place: str, names: Collection[str]) -> bool:
    """Return whether a module's name is one of `names`, or that of something inside one of them."""
    return any(place == name or place.startswith(f"{name}.") for name in names)


def _at_peak(trace: Trace) -> _Living:
    """Return the storages that live at the peak, each with the module that it began in."""
    count = most = 0
    sizes: dict[int, int] = {}
    peak = -1
    for at, event in enumerate(trace.events):
        if isinstance(event, Take):
            sizes[event.storage] = event.bytes
            count += event.bytes
            if count > most:
                most, peak = count, at
        elif isinstance(event, Give):
            count -= sizes.pop(event.storage, 0)
    living: dict[int, tuple[Take, str]] = {}
    place = ""
    for event in trace.events[: peak + 1]:
        if isinstance(event, Work):
            place = event.place
        elif isinstance(event, Take):
            living[event.storage] = (event, place)
        else:
            living.pop(event.storage, None)
    return living
