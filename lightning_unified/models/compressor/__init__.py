"""The compressor: a policy drops tokens; a language model restores or continues the text.

The names below are imported on first use, so that importing the package does not import Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_unified.models.compressor.data.passage_data import PassageData
    from lightning_unified.models.compressor.inference.compress import compress
    from lightning_unified.models.compressor.module import Compressor
    from lightning_unified.models.compressor.sizes import CompressorConfig

__all__ = ["Compressor", "CompressorConfig", "PassageData", "compress"]

_HOMES = {
    "Compressor": "module",
    "CompressorConfig": "sizes",
    "PassageData": "data.passage_data",
    "compress": "inference.compress",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
