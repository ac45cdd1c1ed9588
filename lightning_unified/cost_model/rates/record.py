"""Records of a machine's speeds, each figure with its source."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_unified.cost_model.rates.links import Link

__all__ = ["Alignment", "Rates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Speeds of a machine: the cost of one operation.

    A kernel lasts `kernel` seconds plus the larger of its compute time and its memory time. So a matrix product of s
    operations runs at peak · s / (s + s0) with s0 = kernel · peak: small products do not reach the peak.

    Attributes:
        name: Name of the machine.
        flops: Floating-point operations a second by dtype: `"float32"`, `"bfloat16"`, `"float16"`, and `"tf32"` for float32
            products computed as TF32. `"float32"` is always present and stands for missing dtypes.
        bandwidth: Bytes a second, read and written together.
        launch: Host seconds of one operation, autograd and Python included.
        kernel: Device seconds of the smallest kernel; 0 on a CPU, where `launch` includes it.
        part: Host seconds of a micro-batch besides its operations.
        link: Link to the other devices of a step; None for a step on one device.
        sources: Source of each figure, by field and by dtype: `"measured on …"`, `"table: …"`, `"judgement: …"`.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    kernel: float
    part: float
    link: Link | None = None
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
        """Return the device seconds of a kernel; 0 for a view, which computes and moves nothing."""
        if not flops and not moved:
            return 0.0
        rate = self.flops.get(dtype) or self.flops["float32"]
        return self.kernel + max(flops / rate, moved / self.bandwidth)

    def link_seconds(self, sent: int) -> float:
        """Return the seconds of a collective that sends `sent` bytes; 0 without a link."""
        return 0.0 if self.link is None else self.link.seconds(sent)

    def slowed(self, factor: float) -> "Rates":
        """Return rates whose arithmetic takes `factor` times as long; bandwidth and launches stay."""
        return replace(self, flops={dtype: rate / factor for dtype, rate in self.flops.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `Rates(**values)` restores them.

        The link, which is no property of the device, is left out.
        """
        return {name: value for name, value in asdict(self).items() if name != "link"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Measured gain of sizes that are multiples of 8 or 64, or powers of two, on a machine.

    Attributes:
        device: Device of the measurement.
        dtype: Dtype of the measurement.
        seconds_per_row: Best seconds a row, by rows of the product's left factor.
        without: By property (`"multiple of 8"`, `"multiple of 64"`, `"power of two"`), seconds a row in a neighbouring size
            without it, as a ratio; 1.0 is no difference.
        multiple: The multiple that gains, 64 or 8; 1 if alignment gains nothing beyond noise.
        gain: Seconds a row in a size that is no such multiple, as a ratio; 1.0 if alignment gains nothing.
        source: The measurement in words.
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
        """Restore an alignment from `to_dict`, also after a JSON round trip."""
        rows = {int(rows): float(seconds) for rows, seconds in values["seconds_per_row"].items()}
        return cls(**{**values, "seconds_per_row": rows})

    def describe(self) -> str:
        """Return the finding in a sentence."""
        figures = ", ".join(f"no {name} {ratio:.2f}" for name, ratio in self.without.items())
        verdict = (
            "no alignment of sizes pays" if self.multiple == 1 else f"sizes that are multiples of {self.multiple} pay"
        )
        return f"on {self.device} {verdict}; time a row without each property, relative to with it: {figures} ({self.dtype})"
