"""Lightning's mixed precision with a gradient scaler that is live or absent, and whose state outlives a change of precision."""

from typing import Any

import torch
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import PrecisionError

__all__ = ["MixedPrecision", "gradient_scale", "live_scaler"]

_KEYS = ("MixedPrecision", "native_amp_scaling_state")  # the second is what Lightning wrote before 2.0


class MixedPrecision(stock.MixedPrecision):
    """Runs 16-mixed or bf16-mixed, and never float16 with a scaler that does nothing.

    It bears the name of Lightning's own because Lightning files a plugin's state in the checkpoint under the name of its class
    (2.6.6, checkpoint_connector.py): so a run of either goes on under the other with the scale that it had.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device_type: Where autocast runs.
        scaler: For 16-mixed; default a new one.

    Raises:
        PrecisionError: If 16-mixed would run with a disabled scaler.
    """

    def __init__(self, precision: str, *, device_type: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if precision == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device_type)
        if scaler is not None and not scaler.is_enabled():
            raise PrecisionError(
                f"precision='16-mixed' on {device_type}: torch gave a disabled gradient scaler, so small gradients would vanish unscaled; "
                "use bf16-mixed or 32-true."
            )
        super().__init__(precision, device=device_type, scaler=scaler)  # type: ignore[arg-type]

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip; only with a scaler does a fused optimizer forbid it, and Lightning 2.6.6 refuses it without one as well (amp.py)."""
        plugin = stock.MixedPrecision if self.scaler is not None else stock.Precision
        plugin.clip_gradients(self, optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what becomes of the scaler when a run is resumed in another precision; Lightning calls this before it loads our state."""
        noted = any(checkpoint.get(key) for key in _KEYS)
        if noted and self.scaler is None:
            rank_zero_info(
                f"The checkpoint was made in 16-mixed; {self.precision} needs no gradient scaler, and its state is left."
            )
        if self.scaler is not None and not noted:
            rank_zero_warn(
                "The checkpoint holds no gradient-scaler state (it was made in another precision); the scaler starts anew "
                f"at {self.scaler.get_scale():g}, and may skip the first steps until it has found its scale."
            )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler; an empty state, which torch refuses, leaves it as it is."""
        if state_dict:
            super().load_state_dict(state_dict)


def live_scaler(plugin: stock.Precision) -> torch.amp.GradScaler | None:
    """Return the gradient scaler that `plugin` scales with, None where it has none or a disabled one."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def gradient_scale(plugin: stock.Precision) -> float:
    """Return by what the gradients under `plugin` are multiplied until the optimizer steps; reads one number from the device."""
    scaler = live_scaler(plugin)
    return 1.0 if scaler is None else float(scaler.get_scale())
