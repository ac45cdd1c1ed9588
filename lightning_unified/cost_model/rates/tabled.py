"""Published speeds of known chips: accurate enough to order plans, not to promise times."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from lightning_unified.cost_model.rates.record import Rates
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.simulated.profiles import PROFILES

__all__ = ["tabled_rates", "typical_rates"]

PART = 5e-4
"""Host seconds of a micro-batch: splitting, hooks, logging. Judgement."""

# judgement: share of the published peak that large products reach; an H200 reaches 800 of 989 TFLOP/s in bf16 at 8192 x 8192 x 8192
_REACHED = 0.8

_Host = Literal["server", "desktop", "mac", "embedded"]
# host seconds of an operation, device seconds of the smallest kernel, source
_STARTS: Mapping[_Host, tuple[float, float, str]] = MappingProxyType(
    {
        "server": (8e-6, 3e-6, "judgement: eager PyTorch on a current server"),
        "desktop": (7e-6, 3e-6, "judgement: eager PyTorch on a current desktop"),
        "mac": (11e-6, 5e-6, "scvi-tools #3998: 11.1 us an operation on MPS; the smallest kernel is a judgement"),
        "embedded": (20e-6, 5e-6, "judgement: eager PyTorch on small Arm cores"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chip:
    """Published figures: dense TFLOP/s with fp32 accumulation, and GB/s (10**9)."""

    float32: float
    half: float
    bandwidth: float
    source: str
    tf32: float | None = None
    bfloat16: float | None = None
    host: _Host = "server"


def _apple(float32: float, bandwidth: float, *, bfloat16: float | None = None) -> _Chip:
    source = "Apple's data sheet for GB/s; GPU cores x 128 lanes x 2 x clock; 16-bit formats have no faster unit there (philipturner/metal-benchmarks)"
    return _Chip(float32=float32, half=float32, bfloat16=bfloat16, bandwidth=bandwidth, source=source, host="mac")


_AMPERE_CARD = "NVIDIA GA102 white paper: tensor peaks with fp32 accumulation"
_ADA_CARD = "NVIDIA Ada white paper: tensor peaks with fp32 accumulation"
_SHEET = "NVIDIA's data sheet, without sparsity"

_CHIPS: Mapping[str, _Chip] = MappingProxyType(
    {
        "apple m1": _apple(2.6, 68.3, bfloat16=1.3),
        "apple m1 pro": _apple(5.2, 204.8, bfloat16=2.6),
        "apple m1 max": _apple(10.4, 409.6, bfloat16=5.2),
        "apple m2": _apple(3.6, 102.4, bfloat16=1.8),
        "apple m2 pro": _apple(6.8, 204.8, bfloat16=3.4),
        "apple m2 max": _apple(13.6, 409.6, bfloat16=6.8),
        "apple m3": _apple(3.6, 102.4),
        "apple m3 pro": _apple(6.4, 153.6),
        "apple m3 max": _apple(14.1, 409.6),
        "apple m4": _apple(4.0, 120),
        "apple m4 pro": _apple(8.1, 273),
        "apple m4 max": _apple(16.2, 546),
        "apple m5": _apple(4.0, 153.6),
        "apple m5 max": _Chip(
            float32=16.2,
            half=16.2,
            bandwidth=614,
            source="Apple's data sheet: 614 GB/s, 40 GPU cores, taken at M4 Max's clock; the matrix units in them are not counted (judgement)",
            host="mac",
        ),
        "gb10": _Chip(
            float32=31,
            tf32=31,
            half=62,
            bandwidth=273,
            source="NVIDIA at Hot Chips 2025: 31 TFLOP/s fp32, 1 PFLOP/s fp4 with sparsity, so 62 dense at 16 bits with fp32 accumulation; 273 GB/s",
        ),
        "orin": _Chip(
            float32=5.3,
            tf32=10.6,
            half=21,
            bandwidth=204.8,
            source="Jetson AGX Orin technical brief (64 GB): 5.3 TFLOP/s fp32, 64 tensor cores, 204.8 GB/s",
            host="embedded",
        ),
        "thor": _Chip(
            float32=8.1,
            half=258.5,
            bandwidth=273,
            source="NVIDIA's Jetson Thor announcement (2025): 517 TFLOP/s fp16 with sparsity, so 258.5 dense; 2560 CUDA cores at 1.57 GHz; 273 GB/s",
            host="embedded",
        ),
        "radeon 8060s": _Chip(
            float32=14.8,
            half=59.4,
            bandwidth=256,
            source="AMD: 40 compute units at 2.9 GHz, 512 operations a clock each at 16 bits; LPDDR5X-8000 on 256 bits",
            host="desktop",
        ),
        "radeon rx 6750 xt": _Chip(
            float32=13.3,
            half=26.6,
            bfloat16=6.7,
            bandwidth=432,
            source="AMD's data sheet; bf16 is emulated, taken as half of fp32",
            host="desktop",
        ),
        "mi300x": _Chip(
            float32=163.4, tf32=653.7, half=1307, bandwidth=5300, source="AMD's data sheet, without sparsity"
        ),
        "rtx 3060": _Chip(float32=12.7, tf32=12.7, half=25.5, bandwidth=360, source=_AMPERE_CARD, host="desktop"),
        "rtx 3090": _Chip(float32=35.6, tf32=35.6, half=71, bandwidth=936, source=_AMPERE_CARD, host="desktop"),
        "rtx 4090": _Chip(float32=82.6, tf32=82.6, half=165.2, bandwidth=1008, source=_ADA_CARD, host="desktop"),
        "t4": _Chip(float32=8.1, half=65, bfloat16=4, bandwidth=320, source=f"{_SHEET}; bf16 is emulated"),
        "l4": _Chip(float32=30.3, tf32=60, half=121, bandwidth=300, source=_SHEET),
        "a100": _Chip(float32=19.5, tf32=156, half=312, bandwidth=1555, source=_SHEET),
        "a100 sxm4 80gb": _Chip(float32=19.5, tf32=156, half=312, bandwidth=2039, source=_SHEET),
        "a100 80gb pcie": _Chip(float32=19.5, tf32=156, half=312, bandwidth=1935, source=_SHEET),
        "h100": _Chip(float32=67, tf32=495, half=989, bandwidth=3350, source=_SHEET),
        "h100 pcie": _Chip(float32=51, tf32=378, half=756, bandwidth=2000, source=_SHEET),
        "h200": _Chip(float32=67, tf32=495, half=989, bandwidth=4800, source=_SHEET),
    }
)

_TYPICAL = {"cuda": "NVIDIA GeForce RTX 3090", "rocm": "AMD Radeon 8060S", "mps": "Apple M2"}

# words that name another product than the one in the table, or a slice of it
_VARIANT = re.compile(r"\b(ti|super|laptop|mobile|max q|pro|max|ultra|nvl|nano|nx|xt|xtx|mig)\b")


def tabled_rates(name: str) -> Rates | None:
    """Return the published rates of a machine; None if it is in no table.

    Args:
        name: Name of a simulated machine (`"m2-16gb"`), or of a device as its driver reports it (`"NVIDIA H200"`, `"Apple M4
            Pro"`).
    """
    if not isinstance(name, str):
        raise ConfigurationError(
            f"tabled_rates({name!r}): give a machine's or a device's name, as in 'm2-16gb' or 'NVIDIA H200'."
        )
    known = PROFILES.get(name.lower())
    wanted = _plain(known.chip if known else name)
    matches = [key for key in _CHIPS if re.search(rf"\b{re.escape(key)}\b", wanted)]
    if not matches:
        return None
    key = max(matches, key=len)
    if _VARIANT.search(wanted.replace(key, " ")):
        return None
    return _rates(known.chip if known else name, _CHIPS[key])


def typical_rates(backend: str) -> Rates:
    """Return rates for a device of unknown name: they order plans, but predict no times.

    Raises:
        ValueError: For another backend.
    """
    if backend == "cpu":
        fields = ("flops", "bandwidth", "launch", "kernel", "part")
        judged: dict[str, str] = dict.fromkeys(fields, "judgement: a few cores of a server")
        flops = {"float32": 2e11, "bfloat16": 2e11}
        return Rates(
            name="a typical CPU", flops=flops, bandwidth=3e10, launch=8e-6, kernel=0.0, part=PART, sources=judged
        )
    if backend not in _TYPICAL:
        raise ValueError(f"backend={backend!r} has no rates; there are {', '.join(['cpu', *_TYPICAL])}.")
    rates = tabled_rates(_TYPICAL[backend])
    assert rates is not None
    judged = {name: f"judgement: as of {rates.name}, {source}" for name, source in rates.sources.items()}
    return replace(rates, name=f"a typical {backend} device ({rates.name})", sources=judged)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", name.lower())


def _rates(name: str, chip: _Chip) -> Rates:
    peaks = {"float32": chip.float32, "float16": chip.half, "bfloat16": chip.bfloat16 or chip.half}
    if chip.tf32 is not None:
        peaks["tf32"] = chip.tf32
    launch, kernel, from_where = _STARTS[chip.host]
    table = f"table: {chip.source}; {_REACHED:.0%} of it counts as reachable (judgement)"
    return Rates(
        name=name,
        flops={dtype: _REACHED * peak * 1e12 for dtype, peak in peaks.items()},
        bandwidth=_REACHED * chip.bandwidth * 1e9,
        launch=launch,
        kernel=kernel,
        part=PART,
        sources={"flops": table, "bandwidth": table, "launch": from_where, "kernel": from_where, "part": "judgement"},
    )
