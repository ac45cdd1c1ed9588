"""Note how a step decides by values: a mode that sees each operation that it calls."""

import dis
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from typing_extensions import override

from lightning_unified.nn.autograd_limits import in_a_transform

__all__ = ["BESIDE", "STEPS", "Decided", "Name", "NoteDecisions"]

Name = tuple[Any, ...]

_FEW = 16  # values, such as means of features or counts of labels
_MANY = 4096  # larger tensors hold positions of rows, and would take time
_MOST = 64  # figures of a micro-batch
_REPEATS = 4  # of one place, in a loop
_TORCH = {"torch"}
_MODELS = {"transformers", "peft", "accelerate", "diffusers", "timm", "torchvision"}
# Their code reads values too, mostly of masks, to choose kernels. Noting each of their operations would take a tenth of such a step.
_LIBRARIES = (
    _TORCH | _MODELS | {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_unified", "torchmetrics"}
)

_COMPARES = {"gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal"}
_EQUALS = {"eq", "ne", "not_equal"}
_LARGER = {"maximum", "minimum", "max", "min", "fmax", "fmin"}
_CLAMPS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",), "relu": ()}
_SHIFTS = {"sub", "subtract", "rsub"}  # `relu(count - limit)` compares
_SCALES = {"mul", "multiply", "div", "divide", "true_divide", "pow", "float_power"}
_NUMBERS = {"item", "__float__", "__int__", "__index__"}
_LENGTHS = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"}
_NEAR = 4  # instructions before a comparison that load its operands
_MOST_LIMITS = 8  # of a function

BESIDE = "beside"
"""Marks a number of Python, beside a number with which its function compares something."""

STEPS = {"floor", "ceil", "round", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide"}
"""Operations whose result changes in steps."""

_ORDERED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
_READS = {
    *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__", "item", "tolist", "numpy"),
    *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero"),
}
_MAY_READ = _READS | _COMPARES | _EQUALS | _LARGER | {*_CLAMPS} | STEPS | {"__getitem__"}


class Decided:
    """The decisions of one micro-batch.

    Attributes:
        places: The places of the user's code that called an operation.
        limits: Comparisons by name: their values in the first row, and the limits in the second.
        numbers: Factors by name.
    """

    def __init__(self) -> None:
        self.places: set[Name] = set()
        self.limits: dict[Name, Tensor] = {}
        self.numbers: dict[Name, float] = {}
        self._transfers: list[torch.cuda.Event] = []

    def send(self) -> None:
        """Begin the transfer of values on CUDA devices to the host, which does not wait for it."""
        for device in {pair.device for pair in self.limits.values() if pair.is_cuda}:
            moving = {name: pair for name, pair in self.limits.items() if pair.device == device}
            flat = torch.cat([pair.reshape(-1) for pair in moving.values()])
            sent = flat.to("cpu", non_blocking=True).split([pair.numel() for pair in moving.values()])
            self.limits |= {name: one.view(2, -1) for name, one in zip(moving, sent, strict=True)}
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            self._transfers.append(done)

    def arrived(self) -> dict[Name, tuple[list[float], list[float]]]:
        """Return the values and limits of comparisons, after their transfers have ended."""
        for transfer in self._transfers:
            transfer.synchronize()
        return {name: tuple(pair.tolist()) for name, pair in self.limits.items()}


class NoteDecisions(BaseTorchFunctionMode):
    """Notes the decisions of the step that runs inside.

    Args:
        decided: Holds what is noted; None to tell only whether the step reads or compares values.

    Attributes:
        reads: Whether the step has read or compared values of tensors.
    """

    def __init__(self, decided: Decided | None) -> None:
        super().__init__()
        self._decided, self._is_for_reads, self.reads = decided or Decided(), decided is None, False
        self._counts: Counter[Name] = Counter()

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # torch's own frame, for the place of warnings
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__"  # such as `x.shape`
        if is_attribute or torch.compiler.is_compiling():
            return result
        if self._is_for_reads and (self.reads or not _may_read(name)):  # finding the code that calls takes longest
            return result
        direct = _outside(sys._getframe(1), _TORCH)
        frame = _outside(direct, _LIBRARIES)
        if frame is not None:
            place = (frame.f_code.co_qualname, frame.f_code.co_firstlineno, frame.f_lasti)
            self._decided.places.add(place)
            if frame is direct:  # else a log or a metric reads its own values
                self._note(place, _plain(name), args, kwargs or {}, result)
                self._note_number(place, name, args, result, frame)
        return result

    def _note_number(self, place: Name, name: str, args: Sequence[Any], result: Any, frame: FrameType) -> None:
        """Note a number that Python gets, or the number of chosen entries, beside each limit of the function."""
        if name in _NUMBERS and isinstance(result, (int, float)):
            number = float(result)
        elif (name in _LENGTHS or (name == "__getitem__" and _is_mask(args[1]))) and isinstance(result, Tensor):
            number = float(len(result)) if result.dim() else 1.0
        else:
            return
        for limit in _limits_of(frame):
            self._add(place, f"{BESIDE} {limit}", torch.tensor([[number], [limit]], dtype=torch.float64))

    def _note(self, place: Name, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note what an operation decides: which side of a limit its values are on, or a factor."""
        self.reads |= name in _READS or (name == "__getitem__" and _is_mask(args[1]))
        if name == "__bool__":
            self._add(place, name, torch.tensor([[float(result)], [0.5]]))
        elif name in _COMPARES or name in _EQUALS:
            if len(args) == 2:
                self._add(place, name, _pair(*args, most=1 if name in _EQUALS else _FEW))
        elif name in _LARGER:
            if len(args) == 2 and isinstance(args[1], Tensor):  # else a dimension
                self._add(place, name, _pair(*args, most=_FEW))
        elif name in _CLAMPS:
            value = args[0] if args else kwargs.get("input")
            given = {**dict(zip(_CLAMPS[name], args[1:], strict=False)), **kwargs}
            for limit in (given.get("min"), given.get("max")) if _CLAMPS[name] else (0.0,):
                self._add(place, name, _pair(value, limit, most=_FEW))
        elif name in _SHIFTS and len(args) == 2:
            self._add(place, name, _pair(*args, most=1), reads=False)
        elif name in STEPS:
            self._add(place, name, _pair(result, 0.0, most=_FEW))
        kinds = (int, float) if name in _SCALES else (float,)
        for number in (one for one in (*args, *kwargs.values()) if type(one) in kinds):
            if (key := self._key(place, f"{name} by")) is not None:
                self._decided.numbers[key] = float(number)

    def _add(self, place: Name, name: str, pair: Tensor | None, *, reads: bool = True) -> None:
        self.reads |= reads and pair is not None
        if pair is not None and (key := self._key(place, name)) is not None:
            self._decided.limits[key] = pair

    def _key(self, place: Name, name: str) -> Name | None:
        """Return the name of the next figure at a place; None after enough of them."""
        self._counts[place, name] += 1
        noted, number = self._decided, self._counts[place, name]
        is_enough = number > _REPEATS or len(noted.limits) + len(noted.numbers) >= _MOST
        return None if is_enough else (*place, name, number)


def _plain(name: str) -> str:
    """Return the name of an operation without the mark of one in place."""
    return name if name.startswith("__") else name.rstrip("_")


@cache
def _may_read(name: str) -> bool:
    return _plain(name) in _MAY_READ


def _outside(frame: FrameType | None, packages: set[str]) -> FrameType | None:
    """Return the innermost frame from `frame` on whose code is in none of `packages`."""
    while frame is not None and _package(frame.f_globals.get("__name__")) in packages:
        frame = frame.f_back
    return frame


@cache
def _package(module: Any) -> str:
    """Return the top package of a module; it is asked for each frame of each operation."""
    return str(module).partition(".")[0]


def _limits_of(frame: FrameType) -> Iterator[float]:
    """Yield the numbers with which a running function may compare: constants, and attributes of its `self`."""
    numbers, names = _compared(frame.f_code)
    yield from numbers
    held = getattr(frame.f_locals.get("self"), "__dict__", {}) if names else {}
    yield from (float(held[name]) for name in names if type(held.get(name)) in (int, float))


@lru_cache(maxsize=1024)
def _compared(code: CodeType) -> tuple[list[float], list[str]]:
    """Return the constants and the names of attributes that a function loads just before comparisons."""
    found = [*dis.get_instructions(code)]
    ends = [at for at, one in enumerate(found) if one.opname == "COMPARE_OP"]
    loads = [one for end in ends for one in found[max(end - _NEAR, 0) : end]]
    numbers = dict.fromkeys(
        float(one.argval) for one in loads if type(one.argval) in (int, float) and "CONST" in _kind(one)
    )
    names = dict.fromkeys(one.argval for one in loads if one.opname == "LOAD_ATTR")
    return [*numbers][:_MOST_LIMITS], [*names][:_MOST_LIMITS]


def _kind(instruction: dis.Instruction) -> str:
    """Return the name of an instruction; Python 3.14 loads small whole numbers by one of their own."""
    return instruction.opname.replace("LOAD_SMALL_INT", "LOAD_CONST")


def _pair(value: Any, limit: Any, *, most: int) -> Tensor | None:
    """Return a copy of up to `most` values beside their limits, in two rows; None for other operands.

    Of more values beside one limit that is computed, such as `3 * x.std()`, the smallest and the largest stand for all.
    """
    is_computed = most > 1 and isinstance(value, Tensor) and isinstance(limit, Tensor) and limit.numel() == 1
    is_of_inputs = is_computed and value.dtype in _ORDERED and not value.requires_grad
    if is_of_inputs and _is_plain(value) and most < value.numel() <= _MANY:
        value = torch.stack(torch.aminmax(value))
    tensors = [one for one in (value, limit) if isinstance(one, Tensor)]
    others = [one for one in (value, limit) if not isinstance(one, Tensor)]
    if not tensors or not all(isinstance(one, (int, float)) for one in others):
        return None
    if not all(0 < one.numel() <= most and _is_plain(one) for one in tensors):
        return None
    device = max((one.device for one in tensors), key=lambda one: one.type != "cpu")
    form = torch.float32 if device.type == "mps" else torch.float64
    with torch.no_grad(), torch._C.DisableTorchFunction():
        both = [_entries(one, device, form) for one in (value, limit)]
        sizes = {one.numel() for one in both} - {1}
        return torch.stack(torch.broadcast_tensors(*both)) if len(sizes) < 2 else None


def _entries(value: Any, device: torch.device, form: torch.dtype) -> Tensor:
    """Return the entries of a tensor, or one entry with a number, which needs no transfer."""
    is_tensor = isinstance(value, Tensor)
    made = value.to(device, form) if is_tensor else torch.full((), float(value), device=device, dtype=form)
    return made.detach().reshape(-1)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's values may be kept.

    Those of a transform, fake ones, and those of a CUDA graph that is being recorded may not.
    """
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    has_values = not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta)
    is_recorded = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return is_known and has_values and not is_recorded and not in_a_transform()


def _is_mask(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in entries)
