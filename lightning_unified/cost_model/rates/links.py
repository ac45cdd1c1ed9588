"""Published speeds of links between devices, and the bytes that collectives send.

With the ring algorithm, a rank of N sends a share (N - 1) / N of a tensor in an all-gather or a reduce-scatter, and twice that in an
all-reduce.

Source:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009); `busbw` in nccl-tests' PERFORMANCE.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_unified.errors import ConfigurationError

__all__ = ["LINKS", "Link", "gathered_bytes", "link_of", "reduced_bytes", "tabled_link"]

_REACHED = (
    0.8  # judgement: share of the published bandwidth that large collectives reach, as for the chips in `tabled.py`
)
_LATENCY = 2e-5  # judgement: seconds of the smallest collective over a few devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link by which a device sends to the others.

    Attributes:
        name: Its name, as `link=` takes it, or the given bandwidth in words.
        bandwidth: Bytes a second that a device sends while it receives as many; the part that counts as reachable.
        latency: Seconds of a collective operation on a few bytes.
        source: Source of the figures.
    """

    name: str
    bandwidth: float
    latency: float = _LATENCY
    source: str = "as given"

    def seconds(self, sent: int) -> float:
        """Return the seconds of a collective in which each device sends `sent` bytes."""
        return self.latency + sent / self.bandwidth

    def describe(self) -> str:
        """Return the link in words: its name and its reachable bandwidth."""
        return f"{self.name}, {self.bandwidth / 1e9:.3g} GB/s each way"


def _published(name: str, gigabytes: float, source: str) -> Link:
    """Return a link of so many published GB/s (10**9) each way."""
    reached = f"{source}; {_REACHED:.0%} of it counts as reachable (judgement)"
    return Link(name=name, bandwidth=_REACHED * gigabytes * 1e9, source=reached)


_PCI = "PCI-SIG's base specification: 16 lanes with the overhead of the line code, each way"

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            _published("nvlink5", 900, "NVIDIA's data sheet of B200: 1.8 TB/s both ways together"),
            _published("nvlink4", 450, "NVIDIA's data sheets of H100 and H200 SXM: 900 GB/s both ways together"),
            _published("nvlink3", 300, "NVIDIA's data sheet of A100 SXM: 600 GB/s both ways together"),
            _published("infinity-fabric", 448, "AMD's data sheet of MI300X: 7 links of 128 GB/s both ways together"),
            _published("pcie5", 63, _PCI),
            _published("pcie4", 31.5, _PCI),
            _published("pcie3", 15.75, _PCI),
            _published("ndr400", 50, "NVIDIA's data sheet of ConnectX-7: 400 Gb/s a port each way"),
            _published("ethernet200", 25, "NVIDIA's data sheet of DGX Spark: ConnectX-7 at 200 Gb/s"),
            _published("ethernet10", 1.25, "IEEE 802.3ae: 10 Gb/s each way"),
            Link(name="host", bandwidth=2e9, latency=1e-4, source="judgement: gloo between processes of one machine"),
        )
    }
)
"""Links by name."""

_OF_CHIPS: Mapping[str, str] = MappingProxyType(
    {
        "h100 pcie": "pcie5", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5",
        "a100 80gb pcie": "pcie4", "a100": "nvlink3", "mi300x": "infinity-fabric", "gb10": "ethernet200", "t4": "pcie3",
    }
)  # fmt: skip
"""The link of a chip, where it is not PCIe 4; a longer name precedes one that it contains."""


def tabled_link(backend: str, *, name: str = "") -> Link:
    """Return the published link of a device, or PCIe 4 where none is tabled.

    Args:
        backend: `"cpu"`, `"cuda"` or `"rocm"`.
        name: The device, as its driver reports it (`"NVIDIA H200"`) or as a simulated machine has it; empty if unknown.
    """
    if backend == "cpu":
        return LINKS["host"]
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    known = next((link for chip, link in _OF_CHIPS.items() if re.search(rf"\b{chip}\b", words)), "pcie4")
    return LINKS[known]


def link_of(given: str | float, *, name: str = "link") -> Link:
    """Return the link of a name or of a bandwidth in bytes a second.

    A given bandwidth counts as reachable in full. Errors call the argument `name`.

    Raises:
        ConfigurationError: If there is no link of that name, or the bandwidth is not above 0.
    """
    if isinstance(given, str) and given in LINKS:
        return LINKS[given]
    try:
        bandwidth = float(given)
    except (TypeError, ValueError):
        bandwidth = 0.0
    if isinstance(given, bool) or not 0 < bandwidth < float("inf"):
        raise ConfigurationError(
            f"{name}={given!r}: give one of {', '.join(LINKS)}, or the bytes that a device sends in a second, as in 50e9."
        )
    return Link(name="the given link", bandwidth=bandwidth)


def gathered_bytes(whole: int, *, ranks: int) -> int:
    """Return the bytes that each rank sends to gather, or to reduce and scatter, a tensor."""
    return whole * (ranks - 1) // ranks


def reduced_bytes(whole: int, *, ranks: int) -> int:
    """Return the bytes that each rank sends to sum a tensor of `whole` bytes over all ranks."""
    return 2 * gathered_bytes(whole, ranks=ranks)
