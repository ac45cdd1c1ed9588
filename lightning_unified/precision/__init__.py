"""Layer 2b: choose a run's precision, build its plugin, verify it before the first step.

The precision of a run is resolved once, by `resolve_precision`, from three inputs: the strategy's `precision` (Hydra:
`hardware.precision`, which `memory.precision` refers to), the Trainer's own plugin or flag, and the platform. `gate.py` holds
the names and the rules.
"""

from lightning_unified.precision.gate import Platform, PrecisionChoice, choose_precision, full_name, platform_of
from lightning_unified.precision.mixed import MixedPrecision, gradient_scale, live_scaler
from lightning_unified.precision.resolve import build_plugin, plugin_precision, resolve_precision, resolve_simulated
from lightning_unified.precision.verify import float16_warnings, verify_plugin, verify_run

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
