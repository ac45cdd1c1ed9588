"""A build of torch that cannot use the GPU of its machine.

torch is built for one kind of GPU. With another build the GPU is invisible, and no message says why. This module therefore reads the
machine without torch: drivers leave files, and macOS knows its processor. `torch_builds.py` decides which build fits.
"""

import re
from typing import Any

from lightning_unified.hardware.environment.torch_builds import Machine, choose_build, kernels_run, pip_arguments
from lightning_unified.hardware.environment.variables import Finding
from lightning_unified.hardware.sources import Sources, read_text

__all__ = ["build_advice", "build_findings", "read_machine"]

_NVIDIA, _AMD = "0x10de", "0x1002"  # PCI vendor ids, as in class/drm/card*/device/vendor
_PATIENCE_S = 20.0  # nvidia-smi starts the driver where nothing keeps it loaded


def build_advice(sources: Sources) -> str | None:
    """Return the fault of the installed build of torch and the build to install.

    The result is None if it fits the machine.
    """
    if sources.torch is None or sources.simulated is not None:
        return None
    machine = read_machine(sources)
    if machine.platform == "darwin":
        choice = choose_build(machine)
        return choice.reason if machine.translated else None
    version = getattr(sources.torch, "version", None)
    cuda, hip = _numbers(getattr(version, "cuda", None)), getattr(version, "hip", None)
    if machine.nvidia and not hip:
        return _advice(sources, machine, "CUDA", "NVIDIA", _cuda_fault(sources, machine, cuda))
    if machine.amd and not machine.nvidia and not hip:
        return _advice(sources, machine, "ROCm", "AMD", "without ROCm")
    return None


def build_findings(sources: Sources) -> list[Finding]:
    """Return `build_advice` as a finding, for a diagnosis."""
    advice = build_advice(sources)
    if advice is None:
        return []
    return [Finding(variable="torch", value=str(sources.torch.__version__), verdict="warning", advice=advice)]


def read_machine(sources: Sources) -> Machine:
    """Read the facts that decide the build, without torch.

    Source:
        Linux: PCI vendor ids; the NVIDIA driver's `module/nvidia/version` in sysfs and `/proc/driver/nvidia/version`; amdgpu's `/dev/kfd` as
        `class/kfd` in sysfs, with its topology; the device tree of a Jetson; elsewhere `nvidia-smi`, which WSL and Windows have too. macOS:
        `sysctl.proc_translated` is 1 in a process under Rosetta (Apple, "About the Rosetta translation environment");
        `hw.optional.arm64` is 1 on Apple silicon.
    """
    if sources.platform == "darwin":
        translated = sources.machine == "x86_64" and (
            sources.sysctl("sysctl.proc_translated") == 1 or sources.sysctl("hw.optional.arm64") == 1
        )
        macos = _numbers(sources.sysctl("kern.osproductversion")) or None
        return Machine(platform="darwin", machine=sources.machine, translated=translated, macos=macos)
    vendors = {(read_text(path) or "").strip() for path in sources.sys.glob("class/drm/card*/device/vendor")}
    driver, capability = _nvidia(sources)
    tegra = "tegra" in (read_text(sources.proc / "device-tree" / "compatible") or "")
    return Machine(
        platform=sources.platform,
        machine=sources.machine,
        nvidia=tegra or _NVIDIA in vendors or driver is not None or (sources.proc / "driver/nvidia/version").exists(),
        driver=driver,
        nouveau=(sources.sys / "module/nouveau").exists(),
        capability=capability,
        tegra=tegra,
        # A display driver alone does not compute: AMD's compute driver leaves class/kfd.
        amd=_AMD in vendors and (sources.sys / "class/kfd").exists(),
        architectures=_architectures(sources),
    )


def _cuda_fault(sources: Sources, machine: Machine, cuda: tuple[int, ...]) -> str | None:
    if not cuda:
        return "without CUDA"
    if kernels_run(cuda, machine, driver_counts=not _cuda_works(sources)):
        return None
    return f"for CUDA {'.'.join(map(str, cuda))}"


def _advice(sources: Sources, machine: Machine, kind: str, vendor: str, fault: str | None) -> str | None:
    """Return the advice for a build with `fault`.

    The result is None without a fault, or if torch's CPU build is the one that fits.
    """
    choice = choose_build(machine)
    if fault is None or choice.build == "cpu":
        return None
    found = str(getattr(sources.torch, "__version__", "(unknown version)"))
    said = f"torch {found} is installed, {fault}; this machine has an {vendor} GPU"
    if choice.build is None:
        return f"{said}, and {choice.reason}"
    release = re.match(r"\d+\.\d+\.\d+(?=\+|$)", found)  # a build from source has no release to install
    command = " ".join(
        [
            "pip install --force-reinstall",
            *pip_arguments(choice.build, release[0] if release else "", platform=machine.platform),
        ]
    )
    arm = " for aarch64" if machine.machine in {"aarch64", "arm64"} else ""
    return f"{said} ({choice.reason}): install torch's {kind} build{arm} with {command}"


def _cuda_works(sources: Sources) -> bool:
    is_available: Any = getattr(getattr(sources.torch, "cuda", None), "is_available", None)
    return is_available is not None and bool(is_available())


def _nvidia(sources: Sources) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
    """Return NVIDIA's driver version and the highest compute capability.

    Unknown fields are None.
    """
    written = read_text(sources.sys / "module/nvidia/version")
    if written is None:
        line = (read_text(sources.proc / "driver/nvidia/version") or "").partition("\n")[0]
        found = re.search(r"\b\d{3}\.\d+(\.\d+)*\b", line)
        written = found[0] if found else ""
    driver, capability = _numbers(written), None
    if sources.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
        for row in (sources.run(command, _PATIENCE_S) or "").splitlines():
            version, _, capable = row.partition(",")
            driver = driver or _numbers(version)
            pair = _numbers(capable)
            if len(pair) == 2:
                capability = max(capability or (0, 0), (pair[0], pair[1]))
    return driver or None, capability


def _architectures(sources: Sources) -> tuple[str, ...]:
    """Return the architectures of AMD's GPUs, as ROCm sees them."""
    override = _numbers(sources.environ.get("HSA_OVERRIDE_GFX_VERSION"))
    if len(override) == 3:
        return (_gfx(*override),)
    found = set()
    for path in sources.sys.glob("class/kfd/kfd/topology/nodes/*/properties"):
        version = re.search(r"^gfx_target_version (\d+)$", read_text(path) or "", re.MULTILINE)
        if version and int(version[1]):  # 0: a CPU
            number = int(version[1])
            found.add(_gfx(number // 10000, number // 100 % 100, number % 100))
    return tuple(sorted(found))


def _gfx(major: int, minor: int, step: int) -> str:
    return f"gfx{major}{minor:x}{step:x}"


def _numbers(text: Any) -> tuple[int, ...]:
    """Return the numbers of a version text, empty if it is none."""
    text = str(text or "").strip()
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)*", text) else ()
