"""Compare split gradients with whole ones, parameter by parameter, up to rounding.

Parameter p agrees if

    rms(sum_i w_i g_i - g)  <=  T * (max(rms g, max_i rms w_i g_i) + c * R)

Here g is the gradient of p over all rows, and g_i its gradient over micro-batch i, whose weight is w_i. R is the root mean square of g over
all parameters. The term c * R covers parameters whose gradient is zero up to rounding, such as the bias of an attention's keys.
A tolerance relative to the parameter alone would refuse every sound BERT.

| coarsest format in the run | T | c |
|---|---|---|
| float64 | 1e-6, because losses are often computed in float32 nevertheless | 0.1 |
| float32, without TF32 and autocast | 1e-4 | 0.1 |
| float16 | 4e-3 | 1 |
| bfloat16 | 2e-2 | 1 |

Source of T and c: trials on BERT, GPT-2, a convolutional net with GroupNorm and an LSTM, ten seeds each.
benchmarks/exactness/splittability.py records the differences of sound modules.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

__all__ = [
    "Disagreement",
    "GradientSample",
    "Tolerance",
    "are_finite",
    "disagreement",
    "sample_gradients",
    "tolerance_in_training",
    "unequal_existence",
]

_DOUBLE = 1e-6
_TF32 = 2e-3  # rounding of ten mantissa bits over a deep model
_ENTRIES = 8192  # compared entries of each parameter's gradient: enough to detect a difference, and little memory


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The constants T and c of the formula above."""

    relative: float
    of_all: float

    @classmethod
    def of(cls, formats: Iterable[torch.dtype]) -> "Tolerance":
        """Return the tolerance of runs that made tensors of these floating-point formats."""
        formats = set(formats)
        if torch.bfloat16 in formats:
            return cls(2e-2, 1.0)
        if torch.float16 in formats:
            return cls(4e-3, 1.0)
        return cls(_DOUBLE, 0.1) if formats == {torch.float64} else cls(1e-4, 0.1)


def tolerance_in_training(trainer: L.Trainer) -> float:
    """Return the relative rounding error of results of the step with autocast and TF32."""
    formats = {parameter.dtype for parameter in trainer.lightning_module.parameters()}
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(trainer.precision_plugin.precision))
    found = Tolerance.of({*formats, mixed} if mixed else formats).relative
    return max(found, _TF32) if trainer.strategy.root_device.type == "cuda" and found > _DOUBLE else found


@dataclass(frozen=True, slots=True)
class _Group:
    """Gradient entries of parameters with one device and one format.

    They stay on that device, so that the host does not wait for the run to end.

    Args:
        entries: The entries of these parameters, concatenated.
        indices: The indices of these parameters.
    """

    entries: Tensor
    indices: Sequence[int]


class GradientSample:
    """A sample of a gradient's entries: the same entries in each run.

    Args:
        groups: The entries, by device and format.
        lengths: The number of entries of each parameter.
        scale: The factor that multiplied the loss.
        exist: Whether each parameter has a gradient; empty where unknown.
    """

    def __init__(
        self, groups: Sequence[_Group], lengths: Sequence[int], *, scale: float, exist: Sequence[bool] = ()
    ) -> None:
        self._groups, self.lengths, self._scale, self.exist = groups, lengths, scale, exist

    @cached_property
    def values(self) -> Tensor:
        """The entries of all parameters, concatenated, as float64.

        They lie on the parameters' device if it is a single CPU or CUDA device, else on the CPU.
        """
        groups, self._groups = self._groups, ()
        values = groups[0].entries.to(_device_of(groups)).double() if len(groups) == 1 else self._in_order(groups)
        return values if self._scale == 1 else values / self._scale

    def _in_order(self, groups: Sequence[_Group]) -> Tensor:
        """Return the entries of several groups in the order of the parameters."""
        device, values = _device_of(groups), {}
        for group in groups:
            entries = group.entries.to(device).double().split([self.lengths[index] for index in group.indices])
            values.update(zip(group.indices, entries, strict=True))
        return torch.cat([values[index] for index in range(self.count)]) if values else torch.zeros(0).double()

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self.lengths)

    @property
    def is_zero(self) -> bool:
        """Whether all entries are zero."""
        return not self.squares.any()

    @property
    def says_nothing(self) -> str:
        """The reason why the gradient cannot be compared; empty if it can."""
        if not self.squares.isfinite().all():
            return "its gradient is not finite"
        return "its gradient is zero on the rows looked at" if self.is_zero else ""

    @cached_property
    def squares(self) -> Tensor:
        """The sum of the squares of each parameter's entries, on the host."""
        return self.squares_of(self.values)

    def squares_of(self, values: Tensor) -> Tensor:
        """Return the sum of the squares of each parameter's entries in `values`, on the host.

        `values` has the order of the sample's own values.
        """
        if not len(values):
            return torch.zeros(self.count, dtype=torch.float64)
        lengths = torch.tensor(self.lengths, device=values.device)
        return torch.segment_reduce(values * values, "sum", lengths=lengths, initial=0.0).cpu()

    def sizes_from(self, squares: Tensor) -> Tensor:
        """Return the root mean square of each parameter's entries, given the sums of their squares."""
        return (squares / torch.tensor(self.lengths).clamp_min(1)).sqrt()


def are_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether all entries of gradients are finite; the host waits for the devices once.

    Of a gradient in shards, the own shard counts.
    """
    strided = [one for one in map(_strided, gradients) if one is not None and one.numel()]
    largest = get_total_norm(strided, norm_type=math.inf)
    return bool(largest.isfinite())


def size_of(gradients: Iterable[Tensor | None]) -> float:
    """Return the sum of the absolute entries of gradients; of a gradient in shards, the own shard counts."""
    strided = [one for one in map(_strided, gradients) if one is not None and one.numel()]
    return float(get_total_norm(strided, norm_type=1.0)) if strided else 0.0


def _strided(gradient: Tensor | None) -> Tensor | None:
    """Return the entries of a gradient as a plain tensor."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own.coalesce().values() if own is not None and own.layout is torch.sparse_coo else own


def _device_of(groups: Sequence[_Group]) -> torch.device:
    """Return the device that compares entries: a single CPU or CUDA device, else the CPU.

    MPS has no float64.
    """
    devices = {group.entries.device for group in groups}
    return (
        devices.pop() if len(devices) == 1 and {one.type for one in devices} <= {"cpu", "cuda"} else torch.device("cpu")
    )


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The parameter whose gradient differs most, as a multiple of the tolerance.

    Args:
        excess: The difference divided by the tolerance; at most 1 is rounding.
        relative: The difference relative to the size of the gradient.
        parameter: The index of the parameter.
    """

    excess: float
    relative: float
    parameter: int


def sample_gradients(
    parameters: Sequence[Tensor],
    *,
    scale: float = 1.0,
    joined: Callable[[list[Tensor]], list[Tensor]] = lambda samples: samples,
) -> GradientSample:
    """Return samples of the parameters' gradients; a parameter without a gradient has zeros.

    Args:
        parameters: The parameters; of a sharded one, this rank's rows are sampled.
        scale: The factor that multiplied the loss.
        joined: Returns the entries of all ranks, given those of this one.
    """
    samples = joined([_sample(parameter) for parameter in parameters])
    indices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, sample in enumerate(samples):
        indices.setdefault((sample.device, sample.dtype), []).append(index)
    groups = [_Group(torch.cat([samples[index] for index in chosen]), chosen) for chosen in indices.values()]
    exist = [] if any(isinstance(one, DTensor) for one in parameters) else [one.grad is not None for one in parameters]
    return GradientSample(groups, [len(sample) for sample in samples], scale=scale, exist=exist)


def disagreement(
    whole: GradientSample, micro_batches: Sequence[tuple[GradientSample, float]], tolerance: Tolerance
) -> Disagreement:
    """Return the largest difference between the micro-batches' weighted sum and the whole gradient.

    Args:
        whole: The gradient over all rows.
        micro_batches: The micro-batches' gradients, each with its weight.
        tolerance: The tolerance for the formats of the runs.
    """
    if not whole.count:
        return Disagreement(0.0, 0.0, 0)
    if any(
        len(one.values) != len(whole.values) for one, _ in micro_batches
    ):  # the step trains other parameters for fewer rows
        return Disagreement(math.inf, math.inf, 0)
    # Few kernels run on the device: each that training does not use takes a GPU 10 to 50 ms to load.
    difference = whole.values.clone()
    for one, weight in micro_batches:
        difference.sub_(one.values, alpha=weight)
    off = whole.sizes_from(whole.squares_of(difference))
    weighted = (one.squares * weight**2 for one, weight in micro_batches)
    largest = whole.sizes_from(torch.stack([whole.squares, *weighted]).amax(0))
    of_all = (whole.squares.sum() / max(len(whole.values), 1)).sqrt()
    allowed = tolerance.relative * (largest + tolerance.of_all * of_all)
    excess = torch.where(off == 0, 0.0, off / allowed).nan_to_num(nan=torch.inf)
    worst = int(excess.argmax())
    relative = float(off[worst] / largest[worst]) if largest[worst] else 0.0
    return Disagreement(float(excess[worst]), relative, worst)


def unequal_existence(whole: GradientSample, micro_batches: Sequence[GradientSample]) -> int | None:
    """Return the index of a parameter that has a gradient only whole or only split, or None.

    An optimizer with momentum or weight decay writes a parameter whose gradient is zero, and leaves one without a gradient alone.
    """
    if any(len(one.exist) != len(whole.exist) for one in micro_batches):
        return None
    together = map(any, zip(*(one.exist for one in micro_batches), strict=True))
    pairs = enumerate(zip(whole.exist, together, strict=True))
    return next((index for index, (one, other) in pairs if one != other), None)


def _sample(parameter: Tensor) -> Tensor:
    stride, gradient = _stride(parameter), parameter.grad
    if gradient is None:
        entries = -(-_own(parameter).numel() // stride)
        return torch.zeros(entries * (2 if parameter.is_complex() else 1), device=parameter.device)
    gradient = gradient.detach().to_dense() if gradient.is_sparse else _own(gradient)
    flat = gradient.reshape(-1)[::stride]
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat


def _own(tensor: Tensor) -> Tensor:
    """Return the rows of a sharded tensor that this rank holds, and any other tensor whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stride(tensor: Tensor) -> int:
    return tensor.numel() // _ENTRIES | 1  # odd: an even stride would miss columns of a matrix with an even width
