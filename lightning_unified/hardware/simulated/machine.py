"""A simulated machine: its readings, limits and errors, while this machine's CPU computes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator
from lightning_unified.hardware.simulated.command_queue import CommandQueue
from lightning_unified.hardware.simulated.host import HostFiles, SimulatedHost
from lightning_unified.hardware.simulated.namespace import torch_of
from lightning_unified.hardware.simulated.profiles import PROFILES, Profile, profile
from lightning_unified.hardware.sources import Sources, major_and_minor

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_unified.hardware.simulated.counting import KernelMemory, LiveTensors

__all__ = ["SimulatedMachine"]


class SimulatedMachine:
    """A profile with an allocator, a host, and the sources through which every reader sees them.

    Tensors stay on the CPU; `active` counts them as the device's. Anything that reads hardware takes `sources` and `device`.

    Args:
        machine: A profile, or its name.
        environ: Environment variables of the machine; readers write to a copy.
        bounded: Whether memory runs out; otherwise the counters grow without a limit.
        torch_version: Version of torch on the machine, as in `"2.14"`; default the installed one. It decides Metal's
            allocator and which counters exist.

    Attributes:
        profile: The machine's profile.
        allocator: Allocator of its device.
        command_queue: Runs the device's operations, and aborts those that an `Abort` names.
        sources: Sources of all its figures.

    Raises:
        HardwareError: If no profile has that name, or `torch_version` is no version.
    """

    def __init__(
        self,
        machine: str | Profile,
        *,
        environ: Mapping[str, str] | None = None,
        bounded: bool = True,
        torch_version: str | None = None,
    ) -> None:
        self.profile = machine if isinstance(machine, Profile) else profile(machine)
        self._bounded, self._torch_version = bounded, torch_version
        own_environ = dict(environ or {})
        version = _version_of_torch(torch_version)
        self.allocator = SimulatedAllocator(
            self.profile,
            environ=own_environ,
            room=self._room,
            torch_version=major_and_minor(version),
            bounded=bounded,
        )
        self.command_queue = CommandQueue()
        self._host = SimulatedHost(self.profile, lambda: self.allocator.driver)
        mac = self.profile.backend == "mps"
        self.sources = Sources(
            torch=torch_of(self.allocator, version=version, free=self._free),
            proc=cast(Path, HostFiles(self._host.files, "/proc")),
            sys=cast(Path, HostFiles(self._host.files, "/sys")),
            sysctl=self._host.sysctl,
            environ=own_environ,
            platform="darwin" if mac else "linux",
            machine="arm64" if mac else "x86_64",
            affinity=lambda: self.profile.cores,
            simulated=self.profile.name,
        )
        self._living: LiveTensors | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the same machine; in another process its device holds nothing."""
        make = partial(
            SimulatedMachine,
            environ=dict(self.sources.environ),
            bounded=self._bounded,
            torch_version=self._torch_version,
        )
        known = PROFILES.get(self.profile.name) is self.profile
        return make, (self.profile.name if known else self.profile,), {"others": self.others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the bytes held by other programs."""
        self.others = state["others"]

    @property
    def device(self) -> str:
        """The device's name in torch, on the simulated machine."""
        return self.profile.device

    @property
    def others(self) -> int:
        """Bytes of RAM held by the system and other programs.

        Set it to put the machine under pressure.
        """
        return self._host.others

    @others.setter
    def others(self, count: int) -> None:
        self._host.others = count

    def reading(self) -> Reading:
        """Return a reading of the device's pool."""
        return read(self.device, sources=self.sources)

    @contextmanager
    def active(
        self, *, holding: "Iterable[Tensor]" = (), kernels: "KernelMemory | None" = None
    ) -> "Iterator[LiveTensors]":
        """Count storages made inside the block, and `holding`, as the device's.

        Run attention as it does. Storages that survive the block keep counting until they die or `forget` is called.

        Args:
            holding: Tensors on the device when the block begins.
            kernels: The memory inside Metal's kernels; None counts none. The first block's holds for all. CUDA's and HIP's is never
                counted: most of it belongs to kernels that the CPU does not run.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from lightning_unified.hardware.simulated.counting import LiveTensors

        known = kernels if self.profile.backend == "mps" else None
        self._living = self._living or LiveTensors(self.allocator, self.command_queue, kernels=known)
        self._living.hold(holding)
        with ExitStack() as stack:
            if not self.profile.flash:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield stack.enter_context(self._living)

    def off_device(self) -> AbstractContextManager[None]:
        """Return a block inside which the machine's host computes: tensors made there do not count as the device's."""
        return nullcontext() if self._living is None else self._living.paused()

    def forget(self) -> None:
        """Stop counting all tensors, as when a process leaves the device."""
        if self._living is not None:
            self._living.forget()

    def _free(self) -> int:
        """Return the driver's free bytes; the query constructs the context."""
        self.allocator.construct()
        return self._room() if self.profile.backend != "cuda" or not self.profile.unified else self._free_pages()

    def _free_pages(self) -> int:
        return max(0, self._room() - self.profile.page_cache)

    def _room(self) -> int:
        return self._host.available if self.profile.unified else self.profile.total - self.allocator.driver


def _version_of_torch(given: str | None) -> str:
    """Return the text of torch's version on a machine; without one it is the installed torch's."""
    if given is None:
        import torch

        return torch.__version__
    if major_and_minor(given) == (0, 0):
        raise HardwareError(f"torch_version={given!r} is not a version of torch; write it as in '2.14' or '2.14.1'.")
    return given
