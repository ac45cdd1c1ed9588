"""Lightning's mixed precision with a gradient scaler that is either live or absent."""

from typing import Any

import torch
from lightning.pytorch.plugins import precision as stock
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import PrecisionError

__all__ = ["MixedPrecision", "gradient_scale", "live_scaler"]

_KEYS = ("MixedPrecision", "native_amp_scaling_state")  # Lightning before 2.0 wrote the second


class MixedPrecision(stock.MixedPrecision):
    """Runs 16-mixed or bf16-mixed, and refuses float16 with a disabled scaler.

    Deviations from Lightning's `MixedPrecision` (2.6.6):

    1. A disabled gradient scaler raises, because small float16 gradients would become zero.
    2. A fused optimizer forbids gradient clipping only with a scaler; Lightning refuses it without one as well (amp.py).
    3. A missing or empty scaler state in a checkpoint is reported instead of ignored.

    The class has the name of Lightning's own, because Lightning stores a plugin's state in the checkpoint under its class
    name (checkpoint_connector.py). So a run of either class resumes under the other with its scale.

    Args:
        precision: `"16-mixed"` or `"bf16-mixed"`.
        device_type: Device type of autocast.
        scaler: Gradient scaler for 16-mixed; default a new one.

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
        """Clip gradients, also with a fused optimizer if there is no scaler."""
        plugin = stock.MixedPrecision if self.scaler is not None else stock.Precision
        plugin.clip_gradients(self, optimizer, clip_val=clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Report the fate of the scaler when a run resumes in another precision.

        Lightning calls this before it loads the plugin's state.
        """
        noted = any(checkpoint.get(key) for key in _KEYS)
        if noted and self.scaler is None:
            rank_zero_info(
                f"The checkpoint was made in 16-mixed; {self.precision} needs no gradient scaler, and the scaler's state is ignored."
            )
        if self.scaler is not None and not noted:
            rank_zero_warn(
                "The checkpoint holds no gradient-scaler state (it was made in another precision); the scaler starts anew "
                f"at {self.scaler.get_scale():g} and may skip the first steps until it finds its scale."
            )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scaler; an empty state, which torch refuses, changes nothing."""
        if state_dict:
            super().load_state_dict(state_dict)


def live_scaler(plugin: stock.Precision) -> torch.amp.GradScaler | None:
    """Return the gradient scaler of `plugin`, None if it has none or a disabled one."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def gradient_scale(plugin: stock.Precision) -> float:
    """Return the factor on gradients under `plugin` before the optimizer step.

    It reads one number from the device.
    """
    scaler = live_scaler(plugin)
    return 1.0 if scaler is None else float(scaler.get_scale())
