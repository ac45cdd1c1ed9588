"""Training capabilities of a device, each with its reason and, if relevant, torch version."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_unified.hardware.readers import read
from lightning_unified.hardware.readers.mps import mps_name
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.sources import Sources, read_text, torch_version

if TYPE_CHECKING:
    import torch

__all__ = ["MPS_SCALER_SOUND_SINCE", "Capability", "capabilities", "capability"]

MPS_SCALER_SOUND_SINCE = (2, 13)
"""Before, unscaling zeroed 16-bit gradients (pytorch #184286).

Fused optimizers also ignored the scale (#186360).
"""

_Found = tuple[bool | str, str]  # value and reason
_NO_KERNEL_LIST = "unknown: this torch has no list of the devices with {} kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One capability of a device.

    Attributes:
        name: Fixed name, for programs.
        value: True or False, or a word: `"native"`, `"emulated"`, `"none"`.
        reason: Reason, for people; names the torch version if one decides.
    """

    name: str
    value: bool | str
    reason: str


def capability(name: str, known: Iterable[Capability]) -> bool | str:
    """Return the value of the capability called `name`.

    Raises:
        KeyError: If there is none of that name.
    """
    for entry in known:
        if entry.name == name:
            return entry.value
    raise KeyError(name)


def capabilities(device: "str | torch.device | Reading", *, sources: Sources | None = None) -> list[Capability]:
    """Return the capabilities of `device`, always the same names in the same order.

    Args:
        device: A device, or an existing reading of it.
        sources: Default this machine.

    Raises:
        HardwareError: If the device is not present.
    """
    sources = sources or Sources.live()
    reading = device if isinstance(device, Reading) else read(device, sources=sources)
    fused = _fused(reading, sources)
    found = {
        "bf16": _bf16(reading, sources),
        "fp16": _fp16(reading),
        "float64": _float64(reading),
        "autocast": _autocast(reading),
        "scaler": _scaler(reading, sources),
        **{f"fused_{optimizer}": fused for optimizer in ("adam", "adamw", "sgd")},
        "fused_with_scaler": _fused_with_scaler(reading, sources),
        "foreach": _foreach(reading, sources),
        "compile": _compile(reading, sources),
        "pin_memory": _pinning(reading),
        "non_blocking": _non_blocking(reading),
        "flash_attention_training": _flash(reading, sources),
    }
    return [Capability(name=name, value=value, reason=reason) for name, (value, reason) in found.items()]


def _bf16(reading: Reading, sources: Sources) -> _Found:
    probe = {"cpu": _bf16_cpu, "cuda": _bf16_cuda, "rocm": _bf16_rocm, "mps": _bf16_mps, "xpu": _bf16_xpu}
    return probe[reading.backend](reading, sources)


def _bf16_cpu(reading: Reading, sources: Sources) -> tuple[str, str]:
    del reading
    for line in (read_text(sources.proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            found = sorted({"avx512_bf16", "amx_bf16", "bf16"} & set(value.split()))
            if found:
                return "native", f"the processor has {', '.join(found)}"
            break
    if sources.sysctl("hw.optional.arm.FEAT_BF16") == 1:
        return "native", "sysctl hw.optional.arm.FEAT_BF16 is 1"
    return _bf16_emulated(sources, "cpu", "no bf16 instructions among the processor's flags")


def _bf16_cuda(reading: Reading, sources: Sources) -> tuple[str, str]:
    major, minor = sources.torch.cuda.get_device_capability(_index(reading))
    if major >= 8:
        return "native", f"compute capability {major}.{minor}, and 8.0 or higher has bf16 units"
    return _bf16_emulated(sources, reading.device, f"compute capability {major}.{minor} is below 8.0")


def _bf16_rocm(reading: Reading, sources: Sources) -> tuple[str, str]:
    arch = str(getattr(sources.torch.cuda.get_device_properties(_index(reading)), "gcnArchName", "")).partition(":")[0]
    if re.match(r"gfx(908|90a|94|95|11|12)", arch):
        return "native", f"{arch} has bf16 matrix instructions"
    return _bf16_emulated(
        sources, reading.device, f"{arch or 'an unnamed architecture'} has no bf16 matrix instructions"
    )


def _bf16_mps(reading: Reading, sources: Sources) -> tuple[str, str]:
    name = mps_name(sources)
    chip = re.search(r"Apple M(\d+)", name)
    if chip and int(chip.group(1)) >= 3:
        return "native", f"{name}: M3 and later have bf16"
    which = "M1 and M2 compute bf16 in fp32" if chip else "not a chip known to have bf16 units"
    return "emulated", f"{name}: {which}; memory halves all the same ({reading.device})"


def _bf16_xpu(reading: Reading, sources: Sources) -> tuple[str, str]:
    properties = sources.torch.xpu.get_device_properties(_index(reading))
    if getattr(properties, "has_bfloat16_conversions", False):
        return "native", "the device reports has_bfloat16_conversions"
    return "emulated", "the device reports no has_bfloat16_conversions"


def _bf16_emulated(sources: Sources, device: str, reason: str) -> tuple[str, str]:
    """Return "emulated" if a bf16 sum works on the device, "none" if torch refuses it."""
    try:
        sources.torch.ones(1, dtype=sources.torch.bfloat16, device=device).add(1)
    except Exception as error:
        return "none", f"{reason}, and a bf16 sum fails: {type(error).__name__}"
    return "emulated", f"{reason}; torch computes it by conversion: memory is saved, time is not"


def _fp16(reading: Reading) -> _Found:
    if reading.backend == "cpu":
        return "emulated", "training in fp16 on a CPU becomes bf16: its fp16 kernels are for inference"
    return "native", "with a live loss scaler only; see scaler"


def _float64(reading: Reading) -> _Found:
    if reading.backend == "mps":
        return False, "Metal has no float64: torch raises a TypeError; 64-true cannot train here"
    return True, "supported; slow on consumer GPUs"


def _autocast(reading: Reading) -> _Found:
    if reading.backend == "cpu":
        return "bfloat16", "torch.autocast('cpu'); fp16 there has no scaler in Lightning"
    kind = "cuda" if reading.backend == "rocm" else reading.backend
    return "float16, bfloat16", f"torch.autocast('{kind}')"


def _scaler(reading: Reading, sources: Sources) -> _Found:
    """Return the device name of a loss scaler, and its restrictions (rule R3)."""
    if reading.backend == "cpu":
        return "none", "16-mixed becomes bf16-mixed on a CPU, which needs no scaler"
    if reading.backend != "mps":
        kind = "xpu" if reading.backend == "xpu" else "cuda"
        return kind, f"torch.amp.GradScaler('{kind}') for fp16; bf16 needs none"
    if torch_version(sources) < MPS_SCALER_SOUND_SINCE:
        bugs = "16-bit gradients were zeroed (#184286) and fused optimizers ignored the scale (#186360) before 2.13"
        return "mps", f"fp32 parameters and an unfused optimizer only: {bugs}"
    return "mps", "torch.amp.GradScaler('mps'), sound since torch 2.13"


def _fused(reading: Reading, sources: Sources) -> _Found:
    devices = _kernel_devices(sources, "_get_fused_kernels_supported_devices")
    kind = "cuda" if reading.backend == "rocm" else reading.backend
    if devices is None:
        return False, _NO_KERNEL_LIST.format("fused")
    verb = "is" if kind in devices else "is not"
    return kind in devices, f"{kind} {verb} in torch's list of devices with fused optimizer kernels"


def _fused_with_scaler(reading: Reading, sources: Sources) -> _Found:
    if reading.backend == "cpu":
        return False, "there is no scaler on a CPU"
    if reading.backend == "mps" and torch_version(sources) < MPS_SCALER_SOUND_SINCE:
        return False, "before torch 2.13 the MPS kernels ignored grad_scale and found_inf (#186360)"
    return True, "but not with gradient clipping: Lightning refuses that combination"


def _foreach(reading: Reading, sources: Sources) -> _Found:
    devices = _kernel_devices(sources, "_get_foreach_kernels_supported_devices")
    kind = "cuda" if reading.backend == "rocm" else reading.backend
    if devices is None:
        return False, _NO_KERNEL_LIST.format("foreach")
    if kind in devices:
        return True, f"{kind} is in torch's list of devices with foreach kernels"
    return False, f"{kind} is not in torch's list; unfused optimizers loop over the parameters"


def _kernel_devices(sources: Sources, function: str) -> list[str] | None:
    try:
        return list(getattr(sources.torch.utils._foreach_utils, function)())
    except Exception:
        return None


def _compile(reading: Reading, sources: Sources) -> _Found:
    if reading.backend == "mps":
        return False, "a prototype on MPS: training reports of diverging losses are open (pytorch #150121)"
    if reading.backend == "cpu":
        compiler = sources.environ.get("CXX") or next((c for c in ("g++", "clang++", "cl") if sources.which(c)), None)
        if compiler is None:
            return False, "torch.compile for CPU needs a C++ compiler; g++, clang++ and cl are not here"
        return True, f"a C++ compiler is here: {compiler}"
    if not sources.has_module("triton"):
        return False, "torch.compile for GPUs needs triton, which is not installed"
    if reading.backend == "cuda" and sources.torch.cuda.get_device_capability(_index(reading))[0] < 7:
        return False, "triton needs compute capability 7.0 or higher"
    return True, "triton is installed"


def _pinning(reading: Reading) -> _Found:
    if reading.backend == "cpu":
        return False, "nothing to copy to: batches stay in host memory"
    if reading.backend == "mps":
        return False, "the DataLoader warns and turns it off on MPS (pytorch #86060)"
    if reading.pool == "unified":
        return False, "works, but pinned copies cannot be paged and come out of the same pool as the model"
    return True, "copies to a dedicated pool run beside the computation"


def _non_blocking(reading: Reading) -> _Found:
    if reading.backend in {"cpu", "mps"}:
        why = "silent corruption is open (pytorch #139550, #189690)" if reading.backend == "mps" else "there is no copy"
        return False, f"{why}; Lightning blocks here as well"
    return True, "asynchronous from pinned memory, otherwise the copy blocks"


def _flash(reading: Reading, sources: Sources) -> _Found:
    if reading.backend == "mps":
        return False, "with gradients MPS takes the math path: B x H x S x S scores are kept (pytorch #179294)"
    if reading.backend == "cpu":
        return True, "scaled_dot_product_attention has a CPU flash kernel with a backward pass"
    if reading.backend == "cuda":
        major, minor = sources.torch.cuda.get_device_capability(_index(reading))
        reason = f"compute capability {major}.{minor}; the flash kernel needs 8.0 and fp16 or bf16; else the efficient one runs"
        return major >= 8, reason
    return _probe_flash(reading, sources)


def _probe_flash(reading: Reading, sources: Sources) -> _Found:
    """Query whether a ROCm or XPU build of torch contains the flash kernel.

    Whether the kernel covers the chip is unknown before a run.
    """
    if reading.backend == "rocm":
        probe: Any = getattr(sources.torch.backends.cuda, "is_flash_attention_available", None)
        if probe is not None and probe():
            return True, "torch.backends.cuda.is_flash_attention_available(); the chip itself was not tried"
    return False, "not known to have a backward pass here: planned as the math path, which takes more memory"


def _index(reading: Reading) -> int:
    return int(reading.device.partition(":")[2] or 0)
