"""Let some compiled blocks keep more of their activations than the others, where a plan leaves room.

Compiled blocks keep a share of their activations, and the next larger share may need much more memory in all of them. A larger share in the
last blocks alone fills the room between.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.search.combinations import Combination

__all__ = ["Larger", "Measured", "in_last_blocks", "larger_shares", "most_gained"]

_GAIN = 0.005  # judgement: least share of a step's time that pays for compiling another graph
_TRIED = 2  # numbers of blocks that get a dry run: reserved bytes are nearly proportional to their number
_LOOKED_AT = (
    2  # larger shares that get a dry run, of those that differ: further ones rarely save more time for the same bytes
)
_ALIKE = 1.001  # ratio of bytes of equal graphs: torch's partitioner finds the same one for several shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a step takes.

    Attributes:
        bytes: Bytes that the allocator reserves.
        seconds: Predicted seconds.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Larger:
    """A larger share in some of the blocks.

    Attributes:
        share: The share, up to 1.
        blocks: The number of blocks for which there is room.
    """

    share: float
    blocks: int


def larger_shares(own: Combination, combinations: Sequence[Combination]) -> list[tuple[float, Combination]]:
    """Return `own` with each larger share among `combinations` in all blocks, the smallest first.

    The last one keeps everything. The result is empty if the blocks of `own` do not keep one share.
    """
    policy = own.recompute
    if policy is None or policy.kept is None or policy.kept_last is not None:
        return []
    policies = {one.recompute for one in combinations if one.recompute is not None}
    kept = sorted(one.kept for one in policies if one.kept is not None and one.kept > policy.kept and not one.last)
    found = [(share, RecomputePolicy(blocks="all", kept=share, of=policy.of)) for share in kept]
    found += [(1.0, one) for one in policies if one.blocks == 0]
    return [(share, replace(own, recompute=one)) for share, one in found]


def most_gained(own: Measured, larger: Iterable[tuple[float, Measured]], *, blocks: int, room: int) -> Larger | None:
    """Return the larger share that saves most time in as many blocks as there is room for.

    Bytes and seconds are taken as proportional to the number of blocks. The result is None if no share saves enough.

    Args:
        own: The step in which all blocks keep the share so far.
        larger: Larger shares and the steps in which all blocks keep them, the smallest first.
        blocks: The number of blocks.
        room: Bytes that a step may reserve.
    """
    best, most, known = None, _GAIN * own.seconds, [own]
    for share, step in larger:
        if step.bytes <= known[-1].bytes * _ALIKE or step.seconds >= own.seconds:
            continue
        count = min(int(blocks * (room - own.bytes) / (step.bytes - own.bytes)), blocks - 1)
        if count < 1:
            break  # still larger shares take more
        gain = (own.seconds - step.seconds) * count / blocks
        if gain > most:
            best, most = Larger(share=share, blocks=count), gain
        known.append(step)
        if len(known) > _LOOKED_AT:
            break
    return best


def in_last_blocks(own: Combination, larger: Larger) -> list[Combination]:
    """Return `own` with a larger share in the last blocks: as many as there is room for, or fewer."""
    assert own.recompute is not None
    counts = range(larger.blocks, max(larger.blocks - _TRIED, 0), -1)
    return [
        replace(own, recompute=replace(own.recompute, last=count, kept_last=larger.share), always=True)
        for count in counts
    ]
