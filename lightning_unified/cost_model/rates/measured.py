"""Measure the speeds of the device at hand in a second or two, with torch's own operations."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.cost_model.rates.record import Alignment, Rates
from lightning_unified.cost_model.rates.tabled import PART, tabled_rates
from lightning_unified.units import MIB

__all__ = ["brief_rates", "measure_alignment", "measure_rates"]

_LONG = 0.04  # judgement: seconds of a product beyond which no larger one is tried
_REPEATS = 3
_PAYS = 1.03  # judgement: a difference between sizes below 3 % is noise
_BACKLOG, _TINY = 8, 200
_ROWS, _ROUNDS = (512, 576, 960, 1024), 5


def measure_rates(device: torch.device | str) -> Rates:
    """Measure the rates of a device: at most about two seconds on a CPU and one on a GPU.

    The measurement allocates up to about 300 MiB on the device and frees it. It leaves random generators and settings
    unchanged. Peak counters see it: measure before a cap is set or a peak is read.
    """
    device = torch.device(device)
    name = _name(device)
    with _undisturbed(device):
        flops = _all_products(device, dtypes=_dtypes(device))
        launch = _launch(device)
        kernel = 0.0 if device.type == "cpu" else _kernel(device)
        bandwidth = _bandwidth(device)
    how = f"measured on {name}, torch {torch.__version__}, {torch.get_num_threads()} threads of the host"
    return Rates(
        name=name,
        flops=flops,
        bandwidth=bandwidth,
        launch=launch,
        kernel=kernel,
        part=PART,
        sources={
            "flops": f"{how}: the fastest of square products up to {_sides(device, 2)[-1]}",
            "bandwidth": f"{how}: a buffer scaled in place",
            "launch": f"{how}: forward and backward of narrow layers, by operation",
            "kernel": "part of launch" if device.type == "cpu" else f"{how}: tiny operations behind a backlog",
            "part": "judgement",
        },
    )


def brief_rates(device: torch.device | str, *, name: str, dtypes: Sequence[str]) -> Rates:
    """Return rates that suffice to order plans in 0.1 s, from tables where possible.

    The host's launch time is no property of the device and is always measured. For a device in no table, one product of each
    dtype the run uses and the bandwidth are timed. Side effects are those of `measure_rates`.

    Args:
        device: The device at hand.
        name: Its name, as its driver reports it.
        dtypes: Dtypes of the run's products besides `"float32"`, which is always measured.
    """
    device = torch.device(device)
    known = None if device.type == "cpu" else tabled_rates(name)
    how = f"measured briefly on {name}, torch {torch.__version__}, {torch.get_num_threads()} threads of the host"
    with _undisturbed(device):
        launch = _launch(device)
        if known is not None:
            return replace(known, launch=launch, sources={**known.sources, "launch": how})
        wanted = ["float32", *(["tf32"] if device.type == "cuda" else []), *dtypes]
        flops = _all_products(device, dtypes=wanted, sizes=slice(1, 2) if device.type == "cpu" else slice(-1, None))
        kernel = 0.0 if device.type == "cpu" else _kernel(device)
        bandwidth = _bandwidth(device)
    sources = {**dict.fromkeys(("flops", "bandwidth", "launch", "kernel"), how), "part": "judgement"}
    return Rates(name=name, flops=flops, bandwidth=bandwidth, launch=launch, kernel=kernel, part=PART, sources=sources)


def measure_alignment(device: torch.device | str) -> Alignment:
    """Measure the gain of aligned rows in matrix products; takes about half a second.

    The products are in bfloat16 on a GPU, in float32 on a CPU.

    Each size is compared with neighbours of a few rows less, so costs that do not depend on alignment (partly filled tiles)
    are equal in both. A gain counts only if every pair of neighbours shows it.
    """
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    per_row = _row_seconds(device, dtype)
    ratios = {
        "multiple of 8": [per_row[rows - 3] / per_row[rows - 8] for rows in _ROWS],
        "multiple of 64": [per_row[rows - 8] / per_row[rows] for rows in _ROWS],
        "power of two": [per_row[576] / per_row[512], per_row[960] / per_row[1024]],
    }
    multiple, gain = verdict(ratios)
    return Alignment(
        device=_name(device),
        dtype=str(dtype).removeprefix("torch."),
        seconds_per_row=per_row,
        without={name: statistics.median(found) for name, found in ratios.items()},
        multiple=multiple,
        gain=gain,
        source=f"measured, torch {torch.__version__}: products of (rows, n) and (n, n), the best of several rounds",
    )


def _row_seconds(device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Return seconds per row by size: multiples of 64, each with a multiple of 8 and an odd one."""
    width, calls = (512, 1) if device.type == "cpu" else (4096, 20)
    sizes = [rows - less for rows in _ROWS for less in (0, 8, 3)]
    best = dict.fromkeys(sizes, float("inf"))
    with _undisturbed(device):
        right = _filled((width, width), device, dtype)
        left = _filled((max(sizes), width), device, dtype)
        for round_ in range(_ROUNDS):  # all sizes in turn, so that other load on the machine slows each of them
            for rows in sizes:
                entries = left[:rows]

                def products(entries: Tensor = entries) -> None:
                    for _ in range(calls):
                        entries @ right  # pyright: ignore[reportUnusedExpression]

                seconds = _seconds(products, device, repeats=1, warm=round_ == 0)
                best[rows] = min(best[rows], seconds / calls / rows)
    return best


def verdict(ratios: Mapping[str, Sequence[float]]) -> tuple[int, float]:
    """Return the largest multiple that gains, and the relative time of sizes without it.

    Args:
        ratios: By property, the relative times of neighbours without it, one a pair; a property gains if all pairs show it.
    """
    for multiple in (64, 8):
        found = ratios[f"multiple of {multiple}"]
        if min(found) > _PAYS:
            return multiple, statistics.median(found)
    return 1, 1.0


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "this CPU" if device.type == "cpu" else device.type.upper()


_ALL = slice(None)


def _dtypes(device: torch.device) -> list[str]:
    return {"cpu": ["float32", "bfloat16"], "cuda": ["float32", "tf32", "bfloat16", "float16"]}.get(
        device.type, ["float32", "bfloat16", "float16"]
    )


def _all_products(device: torch.device, *, dtypes: Sequence[str], sizes: slice = _ALL) -> dict[str, float]:
    """Return the rate of products by dtype; a 16-bit format that the device refuses is left out."""
    with _float32_as("highest"):
        flops = {"float32": _product_rate(device, torch.float32, sizes=sizes)}
    if "tf32" in dtypes:
        with _float32_as("high"):
            flops["tf32"] = _product_rate(device, torch.float32, sizes=sizes)
    for dtype in [one for one in dtypes if one not in flops]:
        with suppress(RuntimeError, TypeError):
            flops[dtype] = _product_rate(device, getattr(torch, dtype), sizes=sizes)
    return flops


def _sides(device: torch.device, width: int) -> list[int]:
    largest = 1024 if device.type == "cpu" else (4096 if width == 2 else 2048)
    return [side for side in (256, 512, 1024, 2048, 4096) if side <= largest]


def _product_rate(device: torch.device, dtype: torch.dtype, *, sizes: slice) -> float:
    """Return the highest rate of square products, in operations a second.

    The sizes grow until a product takes long.
    """
    best = 0.0
    for side in _sides(device, dtype.itemsize)[sizes]:
        left, right = _filled((side, side), device, dtype), _filled((side, side), device, dtype)
        seconds = _seconds(lambda left=left, right=right: left @ right, device)
        best = max(best, 2 * side**3 / seconds)
        if seconds > _LONG and side > 256:  # a smaller one is slow only if another program interferes
            break
    return best


def _bandwidth(device: torch.device) -> float:
    size = (64 if device.type == "cpu" else 192) * MIB
    buffer = torch.ones(size // 4, device=device)
    return 2 * size / _seconds(lambda: buffer.mul_(1.0), device)


class _Counter(TorchDispatchMode):
    """Counts the operations below autograd that are no views, as a trace does."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


def _launch(device: torch.device) -> float:
    """Return the host's seconds an operation, from a step with almost no arithmetic."""
    # nn.Linear itself would draw its weights from the device's generator, and later dropout masks of the run would differ
    linear = nn.utils.skip_init(nn.Linear, 8, 8, device=device)
    layers = [linear, nn.LayerNorm(8, device=device), nn.GELU()]
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.fill_(0.1)
    network, entries = nn.Sequential(*layers * 20), _filled((8, 8), device, torch.float32)

    def step() -> None:
        network(entries).sum().backward()

    step()
    with _Counter() as counter:
        step()
    return _seconds(step, device) / counter.count


def _kernel(device: torch.device) -> float:
    """Return the device's seconds of a tiny operation.

    Many of them are timed behind a backlog, so that the host runs ahead of the device.
    """
    side = 4096 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square, tiny = _filled((side, side), device, dtype), torch.ones(16, device=device)

    def backlog() -> None:
        for _ in range(_BACKLOG):
            torch.mm(square, square)

    def both() -> None:
        backlog()
        for _ in range(_TINY):
            tiny.add_(0.0)

    return max(_seconds(both, device) - _seconds(backlog, device), 0.0) / _TINY


def _seconds(call: Callable[[], object], device: torch.device, *, repeats: int = _REPEATS, warm: bool = True) -> float:
    """Return the least time of a few calls, after an untimed one if `warm`."""
    if warm:
        call()
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return max(best, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _filled(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values of ordinary size, without a random generator."""
    return torch.linspace(-1, 1, shape[0] * shape[1], device=device).view(shape).to(dtype)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Shield a measurement from the caller's modes, and restore the caller's state.

    The modes are autocast, inference mode and no-grad.
    """
    state = torch.get_rng_state()
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_rng_state(state)
        if device.type != "cpu":
            getattr(torch, device.type).empty_cache()


@contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
