"""A build of torch that cannot use the GPU of its machine.

torch is built for one kind of GPU: CUDA, ROCm, Metal or none. With another build the GPU is invisible, and nothing says why. So the
machine is asked without torch: NVIDIA's and AMD's kernel drivers leave files, and macOS knows its processor.
"""

from lightning_unified.hardware.environment.variables import Finding
from lightning_unified.hardware.sources import Sources, read_text

__all__ = ["build_advice", "build_findings"]

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}  # PCI vendor ids, as in class/drm/card*/device/vendor
_CHOOSE = "the page Get Started of pytorch.org makes the command"


def build_advice(sources: Sources) -> str | None:
    """Return what is wrong with the installed build of torch, and which to install; None if nothing is.

    Source:
        Linux: the NVIDIA driver's `/proc/driver/nvidia/version`, amdgpu's `/dev/kfd` as `class/kfd` in sysfs, and PCI vendor ids. macOS:
        `sysctl.proc_translated` is 1 in a process under Rosetta (Apple, "About the Rosetta translation environment"); `hw.optional.arm64` is 1 on
        Apple silicon.
    """
    version = getattr(sources.torch, "version", None)
    name = f"torch {getattr(sources.torch, '__version__', '(unknown version)')}"
    if sources.torch is None or sources.simulated is not None:
        return None
    if sources.platform == "darwin":
        return _mac_advice(sources)
    vendors = _vendors(sources)
    if "NVIDIA" in vendors and not getattr(version, "cuda", None):
        arm = ", for aarch64" if sources.machine in {"aarch64", "arm64"} else ""
        return f"{name} is installed, without CUDA; this machine has an NVIDIA GPU: install torch's CUDA build{arm} ({_CHOOSE})."
    if "AMD" in vendors and "NVIDIA" not in vendors and not getattr(version, "hip", None):
        return (
            f"{name} is installed, without ROCm; this machine has an AMD GPU: install torch's ROCm build ({_CHOOSE})."
        )
    return None


def build_findings(sources: Sources) -> list[Finding]:
    """Return `build_advice` as a finding, for a diagnosis."""
    advice = build_advice(sources)
    if advice is None:
        return []
    return [Finding(variable="torch", value=str(sources.torch.__version__), verdict="warning", advice=advice)]


def _mac_advice(sources: Sources) -> str | None:
    if sources.machine == "x86_64" and (
        sources.sysctl("sysctl.proc_translated") == 1 or sources.sysctl("hw.optional.arm64") == 1
    ):
        return (
            "this Python is built for Intel Macs and runs under Rosetta, where torch has no Metal: install a Python for Apple silicon, make the "
            "environment anew, and install torch into it."
        )
    return None


def _vendors(sources: Sources) -> set[str]:
    """Return the vendors of the GPUs whose drivers are loaded."""
    ids = {(read_text(path) or "").strip() for path in sources.sys.glob("class/drm/card*/device/vendor")}
    found = {_VENDORS[one] for one in ids if one in _VENDORS}
    if (sources.proc / "driver/nvidia/version").exists():
        found.add("NVIDIA")
    # A display driver alone does not compute: AMD's compute driver leaves class/kfd.
    return found if (sources.sys / "class/kfd").exists() else found - {"AMD"}
