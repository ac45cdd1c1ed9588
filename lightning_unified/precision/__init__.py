"""Floor 3: the precision gate and its plugins."""

from lightning_unified.precision.float16 import float16_warnings
from lightning_unified.precision.gate import Platform, PrecisionChoice, choose_precision, full_name, platform_of
from lightning_unified.precision.mixed import MixedPrecision, gradient_scale, live_scaler
from lightning_unified.precision.resolve import build_plugin, plugin_precision, resolve_precision, resolve_simulated
from lightning_unified.precision.run import verify_run
from lightning_unified.precision.verify import verify_plugin

__all__ = [
    "MixedPrecision",
    "Platform",
    "PrecisionChoice",
    "build_plugin",
    "choose_precision",
    "float16_warnings",
    "full_name",
    "gradient_scale",
    "live_scaler",
    "platform_of",
    "plugin_precision",
    "resolve_precision",
    "resolve_simulated",
    "verify_plugin",
    "verify_run",
]
