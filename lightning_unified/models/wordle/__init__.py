"""Wordle for language models: the game, prompts, rewards, players, and training by GRPO.

Playing needs no torch: the names below are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.models.wordle.data.wordle_data import WordleData
    from lightning_unified.models.wordle.module import Wordle

__all__ = ["Wordle", "WordleData"]

_HOMES = {"Wordle": "module", "WordleData": "data.wordle_data"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
