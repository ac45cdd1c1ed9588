"""The compressor: a policy drops tokens; a language model restores or continues the text.

Its names are imported on first use, so that importing the package does not import Lightning.
"""

from typing import TYPE_CHECKING

from lightning_unified.models import lazy_exports

if TYPE_CHECKING:
    from lightning_unified.models.compressor.data.passage_data import PassageData
    from lightning_unified.models.compressor.inference.compress import compress
    from lightning_unified.models.compressor.module import Compressor
    from lightning_unified.models.compressor.sizes import CompressorConfig

__all__ = ["Compressor", "CompressorConfig", "PassageData", "compress"]

__getattr__ = lazy_exports(
    __name__,
    {
        "Compressor": "module",
        "CompressorConfig": "sizes",
        "PassageData": "data.passage_data",
        "compress": "inference.compress",
    },
)
