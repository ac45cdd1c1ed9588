"""Repeated blocks in a dry run: trace a few, and copy their events for the others."""

from lightning_unified.planner.repeats.expansion import UnlikeError
from lightning_unified.planner.repeats.replay import Replay
from lightning_unified.planner.repeats.twins import Twins, blocks_of

__all__ = ["Replay", "Twins", "UnlikeError", "blocks_of"]
