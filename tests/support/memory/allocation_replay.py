"""Replay of an allocator's history, to test allocator models against devices."""

from collections.abc import Iterable

from lightning_unified.hardware.allocators.pools import Block, CudaSegments
from lightning_unified.units import MIB

_CUBLAS_WORKSPACE = 32 * MIB  # on the GPU generation of the recordings, Hopper


def replay(events: Iterable[tuple[str, int, int]], *, weights: int | None = None) -> tuple[int, int]:
    """Replay a CUDA allocation history, and return its peaks by the model of the allocator.

    Args:
        events: `action`, `addr` and `size` of each entry of `torch.cuda.memory._snapshot()["device_traces"]`, of one stream
            and from the first allocation on. Allocations and frees are replayed; of the allocator's own actions only the
            release of free segments is.
        weights: Number of allocations before the first computation; None counts those before the first free. cuBLAS's first
            product is taken to be at its workspace of 32 MiB.

    Returns:
        Peaks of allocated and of reserved bytes.
    """
    entries = list(events)
    pools = CudaSegments()
    blocks: dict[int, Block] = {}
    allocated, most, reserved, count, before = 0, 0, 0, 0, ""
    first = _first_that_ends(entries) if weights is None else weights
    for action, address, size in entries:
        if action == "alloc" and size:
            if count >= first:
                (pools.addresses.multiply if size == _CUBLAS_WORKSPACE else pools.addresses.compute)()
            count += 1
            rounded = pools.rounded(size)
            block = blocks[address] = pools.reuse(rounded) or pools.place(rounded, pressed=False)
            allocated += block.size
            most, reserved = max(most, allocated), max(reserved, pools.reserved)
        elif action == "free_requested" and address in blocks:
            allocated -= blocks[address].size
        elif action == "free_completed" and address in blocks:
            pools.give_back(blocks.pop(address))
        elif action == "segment_free" and before != "segment_free":
            pools.release()
        before = action
    return most, reserved


def _first_that_ends(entries: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of allocations before the block that is freed first."""
    actions = [action for action, _, size in entries if action == "free_requested" or (action == "alloc" and size)]
    return max(actions.index("free_requested") - 1, 0) if "free_requested" in actions else len(actions)
