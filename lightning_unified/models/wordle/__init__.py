"""Wordle for language models: the game, prompts, rewards, players, and training by GRPO.

Playing needs no torch: the names below are imported on first use.
"""

from typing import TYPE_CHECKING

from lightning_unified.models import lazy_exports

if TYPE_CHECKING:
    from lightning_unified.models.wordle.data.wordle_data import WordleData
    from lightning_unified.models.wordle.module import Wordle

__all__ = ["Wordle", "WordleData"]

__getattr__ = lazy_exports(__name__, {"Wordle": "module", "WordleData": "data.wordle_data"})
