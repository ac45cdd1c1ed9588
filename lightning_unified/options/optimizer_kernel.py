"""Optimizer kernels: the same update fused, over lists of tensors, or tensor by tensor.

The kernels differ in temporary memory. Fused kernels take none, foreach kernels up to the size of the parameters, and the loop a few
times the largest parameter. The updates differ in rounding only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils import _foreach_utils

from lightning_unified.errors import ConfigurationError

__all__ = ["KERNELS", "Kernel", "KernelChange", "allowed_kernels", "asks_for_kernel", "kernel_of", "set_kernel"]

Kernel = Literal["fused", "foreach", "for-loop"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

_FLAGS = ("foreach", "fused")
_SCALES = "_step_supports_amp_scaling"  # torch's scaler reads this attribute: the optimizer divides by the scale itself
# Torch has fused kernels for these; Adagrad's is for CPUs only in the oldest supported torch.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def kernel_of(optimizer: Optimizer, *, device: str | None = None) -> Kernel | Literal["other"]:
    """Return the kernel that `optimizer` runs.

    Args:
        optimizer: Any optimizer.
        device: The type of device it will run on; by default that of its parameters. It decides where the optimizer was built without
            a choice: torch then takes foreach on devices that have such kernels, and the loop on others.

    Returns:
        The kernel; `"other"` where the optimizer is not one of torch's with several kernels, or its groups differ.
    """
    kernels: set[Kernel] = {_kernel_of_group(group, device) for group in optimizer.param_groups}
    return kernels.pop() if _is_torchs(optimizer) and len(kernels) == 1 else "other"


def allowed_kernels(optimizer: Optimizer, device: str | None = None, *, scaled: bool = False) -> list[Kernel]:
    """Return the kernels that `optimizer` can run with.

    Args:
        optimizer: Any optimizer; only torch's own classes, without derived ones, have a choice.
        device: The type of device it will run on; by default that of its parameters.
        scaled: Whether a gradient scaler is in use. A fused optimizer then allows neither clipping nor reading gradients.

    Returns:
        The kernels, from the least temporaries to the most; empty where there is no choice.
    """
    if not _is_torchs(optimizer):
        return []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters} if device is None else {device}
    plain = not any(group.get("differentiable") for group in optimizer.param_groups)
    plain = plain and all(map(_is_plain, parameters))
    kernels: list[Kernel] = ["for-loop"]
    if plain and devices <= _foreach_devices() and not _has_tensor_options(optimizer):
        kernels = ["for-loop", "foreach"]
    floating = all(p.is_floating_point() and (p.grad is None or not p.grad.is_sparse) for p in parameters)
    if plain and floating and not scaled and type(optimizer) in _FUSED and devices <= _fused_devices(optimizer):
        kernels = ["fused", *kernels]
    return kernels


def asks_for_kernel(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` was built with a choice of kernel (`fused=` or `foreach=`)."""
    return any(group.get(flag) is not None for group in optimizer.param_groups for flag in _FLAGS)


def set_kernel(optimizer: Optimizer, kernel: Kernel) -> "KernelChange":
    """Make `optimizer` run with `kernel` from its next step on.

    The optimizer is one of torch's own, before its first step or between two.

    Returns:
        The change, whose `undo` takes it back.

    Raises:
        ConfigurationError: If the optimizer cannot run with the kernel.
    """
    allowed = allowed_kernels(optimizer)
    if kernel not in allowed:
        name = type(optimizer).__name__
        devices = sorted({p.device.type for group in optimizer.param_groups for p in group["params"]})
        ways = f"it can run with {', '.join(allowed)}" if allowed else "only torch's own optimizers can be changed"
        raise ConfigurationError(
            f'optimizer_kernel="{kernel}": {name} on {", ".join(devices)} cannot run with it; {ways}. '
            'Choose another kernel or "keep", which leaves the optimizer as it was built.'
        )
    return KernelChange(optimizer, kernel)


@dataclass(slots=True)
class _Original:
    """The flags that an optimizer was built or loaded with."""

    groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def of(self, index: int) -> dict[str, Any]:
        """Return the flags of a group; a group that was added later has the default flags."""
        return self.groups[index] if index < len(self.groups) else self.defaults


class KernelChange:
    """Another kernel for an optimizer, from construction until `undo`.

    Checkpoints are the same as without it. `state_dict` returns the flags and step counters of the optimizer as it was built. A loaded
    state runs with this kernel.
    """

    def __init__(self, optimizer: Optimizer, kernel: Kernel) -> None:
        self.kernel = kernel
        self.optimizer: Optimizer | None = optimizer
        self._original = original = _noted(optimizer)
        self._scaled = _SCALES in vars(optimizer)
        _apply(optimizer, kernel)

        # the hooks hold the flags, not this object, which holds the optimizer: the optimizer can then be freed with its last user
        def saved(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return _as_built(state, original)

        def loaded(loaded_into: Optimizer) -> None:
            now = _noted(loaded_into)
            original.groups = now.groups
            _apply(loaded_into, kernel)

        self._hooks = [
            optimizer.register_state_dict_post_hook(saved),
            optimizer.register_load_state_dict_post_hook(loaded),
        ]

    def undo(self) -> None:
        """Restore the optimizer's flags and step counters; a second call does nothing."""
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is None:
            return
        for hook in self._hooks:
            hook.remove()
        for index, group in enumerate(optimizer.param_groups):
            group.update(self._original.of(index))
            _place_steps(optimizer.state, group)
        optimizer.defaults.update(self._original.defaults)
        _tell_scaler(optimizer, fused=self._scaled)


def _noted(optimizer: Optimizer) -> _Original:
    return _Original(groups=[_flags(group) for group in optimizer.param_groups], defaults=_flags(optimizer.defaults))


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    return {flag: options[flag] for flag in _FLAGS if flag in options}


def _apply(optimizer: Optimizer, kernel: Kernel) -> None:
    wanted = {"foreach": kernel == "foreach", "fused": kernel == "fused"}
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update({flag: wanted[flag] for flag in _flags(options)})
    for group in optimizer.param_groups:
        _place_steps(optimizer.state, group)
    _tell_scaler(optimizer, fused=kernel == "fused")


def _tell_scaler(optimizer: Optimizer, *, fused: bool) -> None:
    if fused:
        setattr(optimizer, _SCALES, True)
    else:
        vars(optimizer).pop(_SCALES, None)


def _place_steps(states: Mapping[Any, dict[str, Any]], group: Mapping[str, Any]) -> None:
    """Move step counters to the device that the group's kernel needs.

    Fused and capturable kernels need them on the parameter's device, others on the host.
    """
    for parameter in group["params"]:
        state = states.get(parameter)
        if state and isinstance(state.get("step"), Tensor):
            state["step"] = _step_for(state["step"], group, device=parameter.device)


def _step_for(step: Tensor, group: Mapping[str, Any], *, device: torch.device) -> Tensor:
    if group.get("fused") or group.get("capturable"):
        return step.to(device=device, dtype=torch.float32)
    wide = torch.get_default_dtype() == torch.float64  # as torch.optim.optimizer._get_scalar_dtype
    return step.to(device="cpu", dtype=torch.float64 if wide else torch.float32)


def _as_built(state: dict[str, Any], original: _Original) -> dict[str, Any]:
    """Return a copy of a state dict with the flags of `original` and matching step counters.

    The optimizer's own state is not changed.
    """
    groups = [{**group, **original.of(index)} for index, group in enumerate(state["param_groups"])]
    states = dict(state["state"])
    for group in groups:
        for key in group["params"]:
            entries = states.get(key)
            if entries and isinstance(entries.get("step"), Tensor):
                device = next(
                    (v.device for v in entries.values() if isinstance(v, Tensor) and v.dim()), torch.device("cpu")
                )
                states[key] = {**entries, "step": _step_for(entries["step"], group, device=device)}
    return {**state, "state": states, "param_groups": groups}


def _kernel_of_group(group: Mapping[str, Any], device: str | None) -> Kernel:
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    is_given = any(group.get(flag) is not None for flag in _FLAGS)
    if is_given or group.get("differentiable"):
        return "for-loop"
    capable = set(_foreach_utils._get_foreach_kernels_supported_devices())
    plain = all(map(_is_plain, group["params"]))
    on = {parameter.device.type for parameter in group["params"]} if device is None else {device}
    return "foreach" if plain and on <= capable else "for-loop"


def _is_plain(parameter: Tensor) -> bool:
    """Return whether torch's foreach and fused kernels accept such a parameter.

    A fake tensor is accepted in place of a real parameter.
    """
    return type(parameter) in {Tensor, torch.nn.Parameter} or isinstance(parameter, FakeTensor)


def _is_torchs(optimizer: Optimizer) -> bool:
    """Return whether the class is torch's own and has several kernels.

    A derived class is excluded, because it may change the update.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and "foreach" in optimizer.defaults


def _foreach_devices() -> set[str]:
    """Return the types of device on which foreach operations work.

    On a CPU they are loops, which torch uses only on request.
    """
    return {*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"}


def _fused_devices(optimizer: Optimizer) -> set[str]:
    if type(optimizer) is torch.optim.Adagrad:
        return {"cpu"}
    return set(_foreach_utils._get_fused_kernels_supported_devices())


def _has_tensor_options(optimizer: Optimizer) -> bool:
    """Return whether the learning rate or a decay rate is a tensor.

    Foreach kernels accept such tensors in capturable optimizers only.
    """
    return any(
        isinstance(value, Tensor)
        for group in optimizer.param_groups
        if not group.get("capturable")
        for value in (group.get("lr"), *(group.get("betas") or ()))
    )
