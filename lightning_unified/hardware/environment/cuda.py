"""Cap one-pool CUDA boards by an environment variable, before torch's allocator exists.

Boards whose GPU uses the host's memory hang where a card raises an out-of-memory error.
"""

from collections.abc import Mapping, MutableMapping

from lightning_unified.hardware.budget import Spec, parse_spec, unified_reserve
from lightning_unified.hardware.environment.mps import Cap
from lightning_unified.hardware.host.memory import host_available, host_total
from lightning_unified.hardware.sources import Sources, read_text, torch_version

__all__ = ["ALLOCATOR_VARIABLES", "WRITTEN_CUDA", "is_one_pool_board", "set_cuda_environment", "written_share"]

WRITTEN_CUDA = "LIGHTNING_UNIFIED_CUDA_WRITTEN"
"""Holds the setting this package wrote, so that child processes do not mistake it for the user's own."""

_KEY = "per_process_memory_fraction"
_SINCE = (2, 13)
# torch reads the first that is set (c10/cuda/CUDAAllocatorConfig.h, torch 2.13).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def set_cuda_environment(spec: str | int = "auto", *, sources: Sources | None = None) -> Cap:
    """Write the share of memory that torch's CUDA allocator may use, on a one-pool board.

    There `total_memory` is the host's RAM, so the share is known before CUDA starts. It holds from the first allocation of
    the process; `cap_allocator` sets the exact share later. A user's own setting stays, and other settings beside it.

    `throw_on_cudamalloc_oom` is not written. The share alone keeps torch from asking the driver for more and lets it release
    cached blocks first, which that switch would forbid.

    Args:
        spec: The budget as written.
        sources: Default this machine; its `environ` is written to.

    Raises:
        BudgetError: If the budget cannot be read.
    """
    sources = sources or Sources.live()
    parsed, environ, ram = parse_spec(spec), sources.environ, host_total(sources).bytes
    if not is_one_pool_board(sources) or not ram:
        return Cap(reason="no board whose GPU uses the host's memory: the cap is set when the device is known")
    variable = next((name for name in ALLOCATOR_VARIABLES if environ.get(name)), ALLOCATOR_VARIABLES[0])
    entries = [entry.strip() for entry in environ.get(variable, "").split(",") if entry.strip()]
    ours = environ.get(WRITTEN_CUDA)
    theirs = [entry for entry in entries if entry != ours]
    if any(entry.partition(":")[0].strip() == _KEY for entry in theirs):
        return Cap(reason=f"your own {_KEY} in {variable} stays")
    if torch_version(sources) < _SINCE:
        return Cap(reason=f"torch reads {_KEY} from 2.13 on: the cap is set when the device is known")
    if _is_up(sources):
        return Cap(
            reason=f"too late for {variable}: CUDA is up and has read it; the cap is set when the device is known"
        )
    if not isinstance(environ, MutableMapping):
        return Cap(reason="the environment cannot be written to")
    share = min(1.0, max(0.01, _wanted(parsed, sources, ram) / ram))
    environ[WRITTEN_CUDA] = f"{_KEY}:{share:.4f}"
    environ[variable] = ",".join([*theirs, environ[WRITTEN_CUDA]])
    reason = f"wrote {environ[WRITTEN_CUDA]} to {variable}, before CUDA is up"
    return Cap(applied=True, fraction=share, bytes=int(share * ram), reason=reason)


def is_one_pool_board(sources: Sources) -> bool:
    """Return whether this is a GB10 or a Jetson, without starting CUDA.

    Source:
        The NVIDIA driver's `/proc/driver/nvidia/gpus/*/information`; the device tree of NVIDIA's Tegra boards. Not run on
        either.
    """
    if getattr(sources.torch.version, "cuda", None) is None:
        return False
    for path in sorted(sources.proc.glob("driver/nvidia/gpus/*/information")):
        model = next((line for line in (read_text(path) or "").splitlines() if line.startswith("Model:")), "")
        if "GB10" in model.split():
            return True
    return "tegra" in (read_text(sources.proc / "device-tree" / "compatible") or "")


def written_share(environ: Mapping[str, str]) -> float | None:
    """Return the share that this package wrote, None if it wrote none."""
    key, _, value = environ.get(WRITTEN_CUDA, "").partition(":")
    return float(value) if key == _KEY else None


def _wanted(parsed: Spec, sources: Sources, ram: int) -> float:
    if parsed.kind == "share":
        return parsed.amount * ram
    if parsed.kind == "bytes":
        return parsed.amount
    available = host_available(sources).bytes
    reach = ram if available is None else available
    return reach - parsed.amount if parsed.kind == "leave" else max(reach - unified_reserve(ram), reach / 2)


def _is_up(sources: Sources) -> bool:
    """Return whether torch has started CUDA; True if torch cannot say."""
    try:
        return bool(sources.torch.cuda.is_initialized())
    except AttributeError:
        return True
