"""Choose the kernel that an optimizer would run on another backend, for its fake copy."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["choose_kernel", "host_state"]

_FOREACH_BACKENDS = ("cuda", "rocm")  # torch/utils/_foreach_utils.py: `_get_foreach_kernels_supported_devices`


def choose_kernel(optimizer: Optimizer, *, kernel: str | None, backend: str) -> None:
    """Set the kernel of `optimizer`: the one given, or torch's default on `backend`.

    torch chooses by the type and device of the weights, and fake weights all lie on one device. So the choice is written into each
    parameter group. An optimizer without the kernel stays as it is.

    Source:
        torch/optim/optimizer.py, `_default_to_fused_or_foreach`, 2.13.
    """
    for group in optimizer.param_groups:
        if kernel is not None:
            _write(optimizer, group, fused=kernel == "fused", foreach=kernel == "foreach")
        elif not group.get("fused") and group.get("foreach") is None:
            _write(optimizer, group, fused=False, foreach=backend in _FOREACH_BACKENDS)


def _write(optimizer: Optimizer, group: dict[str, object], *, fused: bool, foreach: bool) -> None:
    if fused and "fused" not in group:
        return
    if "fused" in group:
        group["fused"] = fused
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        if fused:
            optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]
    if "foreach" in group:
        group["foreach"] = foreach and not group.get("differentiable")


def host_state(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the step counts that optimizers keep on the host, wherever their weights are.

    Source:
        torch/optim/adam.py: only capturable and fused groups keep their count on the device.
    """
    counts = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                continue
            for parameter in group["params"]:
                count = optimizer.state.get(parameter, {}).get("step")
                if isinstance(count, Tensor) and count.dim() == 0:
                    counts.append(count)
    return counts
