"""The builds of torch, and the one that fits a machine.

PyTorch builds each release several times: for the CPU, for two or three CUDA versions, for ROCm and for Metal. PyPI holds one build
a platform. The other builds are on download.pytorch.org, one index for each.

    platform                 build on PyPI    other builds
    Linux x86-64             cu130            cpu, cu126, rocm7.2, xpu
    Linux aarch64            cu130            cpu, cu126
    macOS on Apple silicon   metal            none
    Windows                  cpu              cu126, cu130, xpu

The decision is a pure function from facts about a machine, so each machine can be tested on any other. `make train` and the diagnosis of
an installed build (`builds.py`) share it.

References:
    [1] PyTorch's release matrix, generate_binary_build_matrix.py of pytorch/test-infra, for torch 2.13.
    [2] Lowest drivers: table 2 of the release notes of the CUDA Toolkit.
    [3] Compute capabilities: TORCH_CUDA_ARCH_LIST in .ci/manywheel/build_cuda.sh of pytorch/pytorch.
    [4] AMD architectures: the list for ROCm 7.2 in crates/uv-torch of astral-sh/uv.
"""

from dataclasses import dataclass

__all__ = ["Choice", "Machine", "builds_for", "choose_build", "kernels_run", "pip_arguments"]

_ON_PYPI = {"linux": "cu130", "darwin": "metal", "win32": "cpu"}
_CU13_DRIVER, _CU12_DRIVER = (580,), (525, 60)  # [2]
_CU13_CAPABILITY, _CU12_CAPABILITY, _BLACKWELL = (7, 5), (5, 0), (10, 0)  # [3]
_ROCM_ARCHITECTURES = frozenset(
    [
        "gfx900",
        "gfx906",
        "gfx908",
        "gfx90a",
        "gfx942",
        "gfx950",
        "gfx1030",
        "gfx1100",
        "gfx1101",
        "gfx1102",
        "gfx1150",
        "gfx1151",
        "gfx1200",
        "gfx1201",
    ]
)  # [4]
_RUN_KERNELS_OF_GFX1030 = frozenset({"gfx1031", "gfx1032", "gfx1034"})
_INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts that decide the build.

    Attributes:
        platform: As `sys.platform`.
        machine: As `platform.machine()` of the Python that will run torch.
        translated: Whether this Python is built for Intel Macs and runs on Apple silicon.
        macos: Version of macOS; None elsewhere or if unknown.
        nvidia: Whether there is an NVIDIA GPU.
        driver: Version of NVIDIA's driver; None if unknown.
        nouveau: Whether the free driver, which has no CUDA, drives the NVIDIA GPU.
        capability: Highest compute capability of the NVIDIA GPUs; None if unknown.
        tegra: Whether this is a Jetson.
        amd: Whether AMD's compute driver is loaded.
        architectures: AMD GPU architectures, such as `"gfx1151"`; empty if unknown.
    """

    platform: str
    machine: str
    translated: bool = False
    macos: tuple[int, ...] | None = None
    nvidia: bool = False
    driver: tuple[int, ...] | None = None
    nouveau: bool = False
    capability: tuple[int, int] | None = None
    tegra: bool = False
    amd: bool = False
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A build and its reason.

    Attributes:
        build: One of `builds_for(machine)`; None if no build uses this machine's GPU as it is set up now.
        reason: The deciding facts; with no build also the remedy.
        runs_on_cpu: Whether torch's CPU build runs on this machine.
    """

    build: str | None
    reason: str
    runs_on_cpu: bool = True


def builds_for(machine: Machine) -> tuple[str, ...]:
    """Return the names of the builds for the machine's platform.

    They are `metal` for macOS, elsewhere PyTorch's indexes.
    """
    if machine.platform == "darwin":
        return ("metal",)
    if machine.platform == "win32":
        return ("cpu", "cu126", "cu130", "xpu")
    more = () if machine.machine in {"aarch64", "arm64"} else ("rocm7.2", "xpu")
    return ("cpu", "cu126", "cu130", *more)


def choose_build(machine: Machine) -> Choice:
    """Return the build of torch that fits `machine`."""
    if machine.platform == "darwin":
        return _for_mac(machine)
    if machine.nvidia:
        return _for_nvidia(machine)
    if machine.amd and machine.platform == "linux":
        return _for_amd(machine)
    return Choice("cpu", "no NVIDIA or AMD GPU found")


def kernels_run(cuda: tuple[int, ...], machine: Machine, *, driver_counts: bool = True) -> bool:
    """Return whether a build for this CUDA version runs on the machine's driver and GPU.

    Unknown facts count as fitting.

    Args:
        cuda: The CUDA version of the build.
        machine: The machine.
        driver_counts: False where CUDA works nevertheless, as with NVIDIA's forward-compatibility package.
    """
    new = cuda >= (13,)
    if driver_counts and machine.driver and machine.driver < (_CU13_DRIVER if new else _CU12_DRIVER):
        return False
    return machine.capability is None or machine.capability >= (_CU13_CAPABILITY if new else _CU12_CAPABILITY)


def pip_arguments(build: str, version: str, *, platform: str = "linux") -> list[str]:
    """Return the arguments of `pip install` for a build.

    The CPU build is not pinned by its local version: where its index cannot be reached, PyPI's larger build trains on the CPU too.

    Args:
        build: One of `builds_for(machine)`.
        version: The release of torch, as in `"2.13.0"`; empty for any.
        platform: As `sys.platform`.
    """
    plain = f"torch=={version}" if version else "torch"
    if build == _ON_PYPI.get(platform):
        return [plain]
    index = f"{_INDEX}/{build}"
    if build == "cpu":
        return [plain, "--extra-index-url", index]
    return [f"{plain}+{build}", "--extra-index-url", index] if version else [plain, "--index-url", index]


def _for_mac(machine: Machine) -> Choice:
    if machine.translated:
        reason = (
            "this Python is built for Intel Macs and runs under Rosetta, where torch has no Metal: install a Python for Apple silicon, make the "
            "environment anew, and install torch into it."
        )
        return Choice(None, reason, runs_on_cpu=False)
    if machine.machine != "arm64":
        reason = (
            "this is an Intel Mac: PyTorch publishes no builds for it since torch 2.3. conda-forge builds torch for it."
        )
        return Choice(None, reason, runs_on_cpu=False)
    if machine.macos and machine.macos < (14,):
        found = ".".join(map(str, machine.macos))
        return Choice(None, f"torch needs macOS 14 or newer; this is macOS {found}: update macOS.", runs_on_cpu=False)
    return Choice("metal", "Apple silicon")


def _for_nvidia(machine: Machine) -> Choice:
    driver = ".".join(map(str, machine.driver)) if machine.driver else "of unknown version"
    if machine.tegra and (machine.driver is None or machine.driver < _CU13_DRIVER):
        return Choice(
            None,
            f"this Jetson has JetPack 6 or older (driver {driver}), and PyTorch publishes no build for it: update it to JetPack 7.2.",
        )
    if machine.nouveau and machine.driver is None:
        return Choice(None, "nouveau drives this NVIDIA GPU and has no CUDA: install NVIDIA's driver 580 or newer.")
    reason = f"NVIDIA GPU{_capability(machine)}, driver {driver}"
    if kernels_run((13, 0), machine):
        return Choice("cu130", reason)
    if machine.capability and machine.capability < _CU12_CAPABILITY:
        return Choice("cpu", f"{reason}: torch has no kernels for GPUs below compute capability 5.0")
    if kernels_run((12, 6), machine) and (machine.capability or (0, 0)) < _BLACKWELL:
        return Choice("cu126", reason)
    return Choice(
        None, f"NVIDIA's driver {driver} is too old for this GPU{_capability(machine)}: update it to 580 or newer."
    )


def _for_amd(machine: Machine) -> Choice:
    names = ", ".join(machine.architectures) or "of unknown architecture"
    if machine.machine != "x86_64":
        return Choice("cpu", f"AMD GPU on {machine.machine}: PyTorch publishes ROCm builds for x86-64 only")
    if not machine.architectures or _ROCM_ARCHITECTURES & {*machine.architectures}:
        return Choice("rocm7.2", f"AMD GPU {names}")
    if _RUN_KERNELS_OF_GFX1030 & {*machine.architectures}:
        return Choice(
            None,
            f"torch has no kernels for this AMD GPU, {names}; those for gfx1030 run on it: export HSA_OVERRIDE_GFX_VERSION=10.3.0 in this shell.",
        )
    return Choice("cpu", f"AMD GPU {names}: torch has no kernels for it")


def _capability(machine: Machine) -> str:
    return f" (compute capability {machine.capability[0]}.{machine.capability[1]})" if machine.capability else ""
