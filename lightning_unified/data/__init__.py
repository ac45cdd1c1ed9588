"""Data for the models: sources, a split that leaks nothing, a tokenizer that loses nothing, a loader that knows its place.

The data modules are fetched on first use: a spawned worker imports this package, and importing Lightning takes seconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.data.datamodule import TextData
    from lightning_unified.data.label_data import LabelData
    from lightning_unified.data.passage_data import PassageData
    from lightning_unified.data.wordle_data import WordleData

__all__ = ["LabelData", "PassageData", "TextData", "WordleData"]


def __getattr__(name: str) -> Any:
    if name == "LabelData":
        from lightning_unified.data.label_data import LabelData

        return LabelData
    if name == "PassageData":
        from lightning_unified.data.passage_data import PassageData

        return PassageData
    if name == "TextData":
        from lightning_unified.data.datamodule import TextData

        return TextData
    if name == "WordleData":
        from lightning_unified.data.wordle_data import WordleData

        return WordleData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
