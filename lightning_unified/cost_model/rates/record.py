"""The speeds of a machine as records: each figure beside where it comes from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Alignment", "Rates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What an operation costs on a machine.

    A kernel lasts `kernel` seconds and what it computes or moves, whichever takes longer. So a matrix product of s operations runs
    at peak * s / (s + s0) with s0 = kernel * peak: small products do not reach the peak.

    Attributes:
        name: The machine.
        flops: Floating-point operations a second by dtype (`"float32"`, `"bfloat16"`, `"float16"`, and `"tf32"` for float32 that is
            multiplied in that format); `"float32"` is always there, and stands for dtypes that are not.
        bandwidth: Bytes a second, read and written together.
        launch: Seconds of the host that an operation costs, autograd and Python included.
        kernel: Seconds that a kernel takes on the device however little it does; 0 on a CPU, where `launch` holds it.
        part: Seconds of the host that a micro-batch costs beside its operations.
        sources: By field, and by dtype, where the figure comes from: `"measured on …"`, `"table: …"`, `"judgement: …"`.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    kernel: float
    part: float
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speeds = {**self.flops, "bandwidth": self.bandwidth}
        wrong = [name for name, speed in speeds.items() if not speed > 0]
        if wrong or "float32" not in self.flops or min(self.launch, self.kernel, self.part) < 0:
            raise ValueError(
                f"rates of {self.name}: flops={dict(self.flops)}, bandwidth={self.bandwidth:g}, launch={self.launch:g}, "
                f"kernel={self.kernel:g}, part={self.part:g}; speeds must be positive, with one for float32, and times 0 or more."
            )

    def kernel_seconds(self, *, flops: int, moved: int, dtype: str) -> float:
        """Return what a kernel of so many operations and bytes takes on the device; nothing for one that only looks (a view)."""
        if not flops and not moved:
            return 0.0
        rate = self.flops.get(dtype) or self.flops["float32"]
        return self.kernel + max(flops / rate, moved / self.bandwidth)

    def slowed(self, factor: float) -> "Rates":
        """Return rates whose arithmetic takes `factor` times as long, and nothing else."""
        return replace(self, flops={dtype: rate / factor for dtype, rate in self.flops.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `Rates(**values)` is the same again."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Whether sizes that are multiples of 8 or 64, or powers of two, are faster on a machine, in numbers.

    Attributes:
        device: On which it was measured.
        dtype: In which it was measured.
        seconds_per_row: By rows of the product's left factor, what a row took at best.
        without: By property (`"multiple of 8"`, `"multiple of 64"`, `"power of two"`), how much longer a row takes in a neighbouring
            size that lacks it, as a ratio; 1.0 is no difference.
        multiple: The multiple that pays, 64 or 8; 1 where alignment gains nothing beyond noise.
        gain: How much longer a row takes in a size that is no such multiple, as a ratio; 1.0 where alignment gains nothing.
        source: How it was measured, in words.
    """

    device: str
    dtype: str
    seconds_per_row: Mapping[int, float]
    without: Mapping[str, float]
    multiple: int
    gain: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the rows become strings in JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Alignment":
        """Return what `to_dict` gave, also by way of JSON."""
        rows = {int(rows): float(seconds) for rows, seconds in values["seconds_per_row"].items()}
        return cls(**{**values, "seconds_per_row": rows})

    def describe(self) -> str:
        """Return the finding in a sentence."""
        figures = ", ".join(f"no {name} {ratio:.2f}" for name, ratio in self.without.items())
        verdict = (
            "no alignment of sizes pays" if self.multiple == 1 else f"sizes that are multiples of {self.multiple} pay"
        )
        return f"on {self.device} {verdict}: times as long a row, by what its size is not: {figures} ({self.dtype})"
