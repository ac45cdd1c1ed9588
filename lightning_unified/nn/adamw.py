"""AdamW kernel choice and learning-rate schedule, shared by the models' optimizers."""

import math

from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

__all__ = ["kernel_arguments", "learning_rate_factor"]


def kernel_arguments(kernel: str, *, device: str, precision: str = "32-true") -> dict[str, bool]:
    """Return the arguments that choose an optimizer kernel in torch.

    "auto" is the fused kernel wherever torch has one for the device. It needs no temporaries; the for-each kernel needs as many
    bytes as the parameters. Under fp16 with a scaler "auto" is torch's own choice, because Lightning
    refuses to clip gradients there with a fused optimizer.

    Raises:
        ValueError: If `kernel` is "fused" and torch has no such kernel for the device.
    """
    devices = _get_fused_kernels_supported_devices()
    if kernel == "auto":
        return {"fused": True} if device in devices and precision != "16-mixed" else {}
    if kernel == "fused":
        if device not in devices:
            raise ValueError(
                f"torch has no fused AdamW for {device}, only for {', '.join(devices)}; use optimizer_kernel=foreach."
            )
        return {"fused": True}
    return {"foreach": kernel == "foreach"}


def learning_rate_factor(step: int, *, warmup_steps: int, total_steps: float, schedule: str) -> float:
    """Return optimizer step `step`'s share of the peak learning rate; the first step is 0.

    It rises linearly to 1 over `warmup_steps`, then falls to 0 at `total_steps`: linearly, or as half a cosine (Loshchilov
    and Hutter 2017, eq. 5, without restarts); "constant" stays at 1. A run shorter than its warm-up ends while it rises.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
