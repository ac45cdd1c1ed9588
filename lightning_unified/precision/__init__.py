"""Floor 3: the precision gate and its plugins."""

from lightning_unified.precision.gate import (
    GatedMixedPrecision,
    PrecisionChoice,
    build_plugin,
    choose_precision,
    plugin_precision,
    verify_plugin,
)

__all__ = [
    "GatedMixedPrecision",
    "PrecisionChoice",
    "build_plugin",
    "choose_precision",
    "plugin_precision",
    "verify_plugin",
]
