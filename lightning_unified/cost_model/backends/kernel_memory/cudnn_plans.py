"""Ask cuDNN for the workspace of a convolution, on the GPU that will run it.

cuDNN chooses among dozens of kernels by rules of its own, and their workspaces differ by the size of all operands. torch takes
the first kernel of cuDNN's list for a convolution that can run (`torch.backends.cudnn.benchmark` off). This module asks for the
same list, through the C functions of cuDNN's graph interface, and reads the workspace of that kernel. No kernel runs, and no
tensor is allocated.

Where no cuDNN can be asked (another machine plans, another backend, `benchmark` on), the formulas in `convolution` count.

References: NVIDIA, cuDNN Graph API (`cudnn_graph.h` names the constants below); torch's `native/cudnn/Conv_v8.cpp`, whose order of
lists and whose exclusions these functions follow.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch

__all__ = ["Operand", "Pass", "asked_workspace"]

log = logging.getLogger("lightning_unified")

Pass = Literal["forward", "input", "weight"]
"""A pass of a convolution: forward, or for the gradient of the input or of the weight."""

_LIBRARY = "libcudnn.so.9"
_ALIGNMENT = 16  # bytes; torch passes no more
_MOST_NOTES = 32
# cudnnDataType_t
_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_FLOAT, _DOUBLE = 0, 1
# cudnnBackendDescriptorType_t
_CONVOLUTION, _ENGINE, _CONFIGURATION, _HEURISTIC, _PLAN, _GRAPH, _TENSOR = 1, 2, 3, 4, 5, 15, 17
_OPERATIONS = {"forward": 10, "weight": 11, "input": 12}
# cudnnBackendAttributeType_t
_IS_HANDLE, _IS_TYPE, _IS_INTEGER, _IS_FLOAT = 0, 1, 3, 4
_IS_MODE, _IS_HEURISTIC, _IS_NOTE, _IS_DESCRIPTOR = 7, 8, 11, 15
_ARRAYS: dict[int, Any] = {_IS_INTEGER: c_int64, _IS_FLOAT: c_float, _IS_HANDLE: c_void_p, _IS_DESCRIPTOR: c_void_p}
# cudnnBackendAttributeName_t of an operation: alpha, beta, convolution, input, output, weight
_OF_OPERATION = {
    "forward": (700, 701, 702, 704, 705, 703),
    "input": (706, 707, 708, 710, 711, 709),
    "weight": (712, 713, 714, 716, 717, 715),
}
# cudnnBackendHeurMode_t: torch asks for the instant list, then for the fallbacks
_LISTS = (0, 2)
# cudnnBackendNumericalNote_t
_ON_TENSOR_CORES, _LOWERS_INPUTS, _VARIES = 0, 1, 4


class _CudnnError(Exception):
    """A call of cuDNN failed."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Sizes and strides of a tensor, of four dimensions or more."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def asked_workspace(
    which: Pass,
    operands: tuple[Operand, Operand, Operand],
    dtype: torch.dtype,
    *,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> int | None:
    """Return the bytes of a convolution's workspace as cuDNN states them; None if it cannot say.

    Args:
        which: The forward pass, or the pass for the gradient of the input or of the weight.
        operands: Input, weight and output of the forward pass; gradients have their shapes and layouts.
        dtype: Type of all three.
        padding: Entries added on each side of each spatial dimension.
        stride: Stride of each spatial dimension.
        dilation: Distance between the kernel's points in each spatial dimension.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None or dtype not in _TYPES:
        return None
    settings = torch.backends.cudnn
    if not settings.enabled or settings.benchmark:
        return None
    excluded = {_LOWERS_INPUTS}
    if settings.deterministic:
        excluded.add(_VARIES)
    if dtype is torch.float32 and not settings.allow_tf32:
        excluded.add(_ON_TENSOR_CORES)
    places = tuple(padding), tuple(stride), tuple(dilation)
    return _workspace(which, operands, dtype, places, frozenset(excluded), torch.cuda.current_device())


@lru_cache(maxsize=4096)
def _workspace(
    which: Pass,
    operands: tuple[Operand, Operand, Operand],
    dtype: torch.dtype,
    places: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    excluded: frozenset[int],
    device: int,  # a key of the cache: GPUs may differ
) -> int | None:
    try:
        cudnn = _library()
        handle = _handle(device)
        graph = _graph(cudnn, handle, which, operands, dtype, places)
        for configuration in _configurations(cudnn, graph):
            if excluded.isdisjoint(_notes(cudnn, configuration)):
                size = _size(cudnn, handle, configuration)
                if size is not None:
                    return size
    except (OSError, _CudnnError) as error:
        log.debug("cuDNN states no workspace for a convolution of %s: %s", operands[0].shape, error)
    return None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Return the library that torch has loaded."""
    library = ctypes.CDLL(_LIBRARY)
    library.cudnnGetErrorString.restype = c_char_p
    return library


@lru_cache(maxsize=16)
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library(), _library().cudnnCreate(byref(handle)))
    return handle


def _check(cudnn: ctypes.CDLL, status: int) -> None:
    if status:
        raise _CudnnError(cudnn.cudnnGetErrorString(c_int(status)).decode())


class _Descriptor:
    """One of cuDNN's descriptors; it is destroyed with this object."""

    def __init__(self, cudnn: ctypes.CDLL, kind: int) -> None:
        self.address = c_void_p()
        self._cudnn = cudnn
        _check(cudnn, cudnn.cudnnBackendCreateDescriptor(c_int(kind), byref(self.address)))

    def __del__(self) -> None:
        if self.address:
            self._cudnn.cudnnBackendDestroyDescriptor(self.address)

    def set(self, name: int, kind: int, values: Sequence[Any]) -> Self:
        """Set an attribute."""
        plain = [each.address if isinstance(each, _Descriptor) else each for each in values]
        array = (_ARRAYS.get(kind, c_int) * len(plain))(*plain)
        status = self._cudnn.cudnnBackendSetAttribute(
            self.address, c_int(name), c_int(kind), c_int64(len(plain)), array
        )
        _check(self._cudnn, status)
        return self

    def finish(self) -> Self:
        """End the setting of attributes; cuDNN checks them here."""
        _check(self._cudnn, self._cudnn.cudnnBackendFinalize(self.address))
        return self

    def get(self, name: int, kind: int, array: Any, most: int) -> int:
        """Read an attribute into `array`; return its number of entries."""
        count = c_int64()
        status = self._cudnn.cudnnBackendGetAttribute(
            self.address, c_int(name), c_int(kind), c_int64(most), byref(count), array
        )
        _check(self._cudnn, status)
        return count.value


def _graph(
    cudnn: ctypes.CDLL,
    handle: c_void_p,
    which: Pass,
    operands: tuple[Operand, Operand, Operand],
    dtype: torch.dtype,
    places: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> _Descriptor:
    """Return the graph of one convolution."""
    padding, stride, dilation = places
    convolution = _Descriptor(cudnn, _CONVOLUTION)
    convolution.set(100, _IS_TYPE, [_DOUBLE if dtype is torch.float64 else _FLOAT])
    convolution.set(101, _IS_MODE, [1])  # cross-correlation
    convolution.set(102, _IS_INTEGER, dilation).set(103, _IS_INTEGER, stride)
    convolution.set(104, _IS_INTEGER, padding).set(105, _IS_INTEGER, padding)
    convolution.set(106, _IS_INTEGER, [len(stride)]).finish()
    source, weight, output = (
        _Descriptor(cudnn, _TENSOR)
        .set(900, _IS_INTEGER, [_ALIGNMENT])
        .set(901, _IS_TYPE, [_TYPES[dtype]])
        .set(902, _IS_INTEGER, each.shape)
        .set(903, _IS_INTEGER, each.strides)
        .set(906, _IS_INTEGER, [place])
        .finish()
        for place, each in enumerate(operands, 1)
    )
    alpha, beta, of_convolution, of_source, of_output, of_weight = _OF_OPERATION[which]
    operation = _Descriptor(cudnn, _OPERATIONS[which])
    operation.set(of_source, _IS_DESCRIPTOR, [source]).set(of_output, _IS_DESCRIPTOR, [output])
    operation.set(of_weight, _IS_DESCRIPTOR, [weight]).set(of_convolution, _IS_DESCRIPTOR, [convolution])
    operation.set(alpha, _IS_FLOAT, [1.0]).set(beta, _IS_FLOAT, [0.0]).finish()
    return _Descriptor(cudnn, _GRAPH).set(800, _IS_HANDLE, [handle]).set(801, _IS_DESCRIPTOR, [operation]).finish()


def _configurations(cudnn: ctypes.CDLL, graph: _Descriptor) -> Iterator[_Descriptor]:
    """Yield the kernels that cuDNN lists for a graph, best first."""
    for mode in _LISTS:
        heuristic = _Descriptor(cudnn, _HEURISTIC).set(201, _IS_DESCRIPTOR, [graph]).set(200, _IS_HEURISTIC, [mode])
        try:
            count = heuristic.finish().get(202, _IS_DESCRIPTOR, None, 0)
        except _CudnnError:
            continue  # no list of this kind
        found = [_Descriptor(cudnn, _CONFIGURATION) for _ in range(count)]
        array = (c_void_p * count)(*[each.address for each in found])
        yield from found[: heuristic.get(202, _IS_DESCRIPTOR, array, count)]


def _notes(cudnn: ctypes.CDLL, configuration: _Descriptor) -> set[int]:
    """Return the numerical notes of a kernel."""
    engine, notes = _Descriptor(cudnn, _ENGINE), (c_int * _MOST_NOTES)()
    configuration.get(300, _IS_DESCRIPTOR, (c_void_p * 1)(engine.address), 1)
    return set(notes[: engine.get(1303, _IS_NOTE, notes, _MOST_NOTES)])


def _size(cudnn: ctypes.CDLL, handle: c_void_p, configuration: _Descriptor) -> int | None:
    """Return the bytes of a kernel's workspace, or None if it cannot run."""
    plan, size = _Descriptor(cudnn, _PLAN), c_int64()
    try:
        plan.set(400, _IS_HANDLE, [handle]).set(401, _IS_DESCRIPTOR, [configuration]).finish()
    except _CudnnError:
        return None
    plan.get(402, _IS_INTEGER, byref(size), 1)
    return size.value
