"""Repeated blocks of a dry run: a few are traced, and the others' events are copies of theirs."""

from lightning_unified.planner.repeats.expansion import UnlikeError
from lightning_unified.planner.repeats.replay import Replay
from lightning_unified.planner.repeats.twins import Twins, blocks_of

__all__ = ["Replay", "Twins", "UnlikeError", "blocks_of"]
