"""MPS's allocator since torch 2.14, written anew from its source, function by function.

Names are those of torch's MPSAllocator.h and MPSAllocator.mm, so that the two can be read side by side. One stream, and a GPU
that has finished all its work. Slow. The model in `hardware/allocators/metal/placement.py` is compared with it.
"""

from dataclasses import dataclass, field

from lightning_unified.hardware.allocators.metal import MetalLimits, PlacementHeaps

MB = 1 << 20
PAGE = 16384
ALIGNMENT = 256
UNLIMITED = (1 << 64) - 1
TIERS = {"SMALL": 8 * MB, "LARGE": 32 * MB, "XLARGE": 1024 * MB}


@dataclass(eq=False)
class BufferBlock:
    size: int
    offset: int
    heap: "HeapBlock"
    next: "BufferBlock | None" = None
    in_use: bool = False
    buffer: bool = False  # whether a buffer is placed on it, then also the stream's own


@dataclass(eq=False)
class HeapBlock:
    heap_id: int
    total_size: int
    free_bytes: int
    max_free_run: int
    first_block: BufferBlock | None = None

    def blocks(self):
        block = self.first_block
        while block is not None:
            yield block
            block = block.next


@dataclass(eq=False)
class BufferPool:
    min_split: int
    available_size: int = 0
    heaps: list[HeapBlock] = field(default_factory=list)
    available_buffers: list[BufferBlock] = field(default_factory=list)

    def lower_bound(self, size, *, of_stream=False):
        fitting = [b for b in self.available_buffers if b.size >= size and (b.buffer or not of_stream)]
        return min(fitting, key=lambda b: (b.size, b.heap.heap_id, b.offset), default=None)


def get_heap_tier(size, has_memory_pressure):
    if size <= MB:
        return "SMALL"
    if size < 10 * MB:
        return "LARGE"
    if size < 1024 * MB // 2 and not has_memory_pressure:
        return "XLARGE"
    return "OVERSIZE"


class MPSHeapAllocatorImpl:
    def __init__(self, *, high=UNLIMITED, low=UNLIMITED, others=0, max_buffer_size=UNLIMITED):
        self.high, self.low, self.others, self.max_buffer_size = high, low, others, max_buffer_size
        self.small, self.large = BufferPool(min_split=ALIGNMENT), BufferPool(min_split=MB)
        self.heap_counter = 0
        self.total_allocated_memory = self.current_allocated_memory = 0
        self.peak_total_allocated_memory = self.peak_current_allocated_memory = 0

    def current_allocated_size(self):
        return self.total_allocated_memory + self.others

    def low_watermark_value(self):
        if self.low == UNLIMITED:
            return UNLIMITED
        distance = self.low - self.current_allocated_size()
        return distance // MB if distance >= 0 else 0

    def get_allocation_size(self, size):
        aligned = (size + ALIGNMENT - 1) & ~(ALIGNMENT - 1)
        if aligned <= MB:
            return aligned
        leading_zeros = 64 - len(f"{aligned:b}")
        granule = (1 << (63 - leading_zeros)) >> 5
        granule = max(granule, PAGE)
        bucketed = (aligned + granule - 1) & ~(granule - 1)
        if bucketed >= self.max_buffer_size or get_heap_tier(bucketed, False) != get_heap_tier(aligned, False):
            return aligned
        return bucketed

    def get_pool(self, alloc_size):
        return self.small if alloc_size <= MB else self.large

    def get_free_buffer(self, pool, size):
        if self.current_allocated_size() + size > self.high:
            return None
        block = pool.lower_bound(size, of_stream=True)
        if block is not None and block.size - size < pool.min_split:
            return self.split_free_block(pool, block, size)
        block = pool.lower_bound(size)
        if block is not None:
            return self.split_free_block(pool, block, size)
        return self.coalesce_free_blocks(pool, size)

    def split_free_block(self, pool, block, size):
        heap, block_size = block.heap, block.size
        pool.available_buffers.remove(block)
        pool.available_size -= block_size
        heap.free_bytes -= block_size
        remainder_size = block_size - size
        if remainder_size >= pool.min_split:
            block.buffer = False
            remainder = BufferBlock(remainder_size, block.offset + size, heap, next=block.next)
            block.next = remainder
            block.size = size
            pool.available_buffers.append(remainder)
            pool.available_size += remainder_size
            heap.free_bytes += remainder_size
        block.buffer = True
        heap.max_free_run = min(heap.max_free_run, heap.free_bytes)
        return block

    def merge_free_blocks(self, pool, first, last):
        if first is last:
            return first
        after = last.next
        first.buffer = False
        merged_size = first.size
        block = first.next
        while block is not after:
            pool.available_buffers.remove(block)
            merged_size += block.size
            block = block.next
        first.size, first.next = merged_size, after
        return first

    def coalesce_free_blocks(self, pool, size):
        for heap in pool.heaps:
            if heap.max_free_run < size:
                continue
            largest_run = free_run = merge_run = 0
            merge_first = None
            for block in heap.blocks():
                if block.in_use:
                    free_run = merge_run = 0
                    merge_first = None
                    continue
                free_run += block.size
                largest_run = max(largest_run, free_run)
                merge_first = merge_first or block
                merge_run += block.size
                if merge_run >= size:
                    return self.split_free_block(pool, self.merge_free_blocks(pool, merge_first, block), size)
            heap.max_free_run = largest_run
        return None

    def alloc_heap(self, pool, size, has_memory_pressure):
        if self.current_allocated_size() + size > self.high:
            return None
        tier = get_heap_tier(size, has_memory_pressure)
        total = TIERS[tier] if tier in TIERS else 2 * MB * ((size + 2 * MB - 1) // (2 * MB))
        self.heap_counter += 1
        heap = HeapBlock(self.heap_counter, total, total, total)
        self.total_allocated_memory += total
        self.peak_total_allocated_memory = max(self.peak_total_allocated_memory, self.total_allocated_memory)
        pool.heaps.append(heap)
        block = heap.first_block = BufferBlock(total, 0, heap)
        pool.available_buffers.append(block)
        pool.available_size += total
        return self.split_free_block(pool, block, size)

    def release_heap(self, pool, heap):
        for block in heap.blocks():
            pool.available_buffers.remove(block)
            pool.available_size -= block.size
        pool.heaps.remove(heap)
        self.total_allocated_memory -= heap.total_size

    def release_free_heaps(self, pool, target_size):
        releasable, released_size = [], 0
        for heap in pool.heaps:
            if released_size >= target_size:
                break
            if heap.free_bytes == heap.total_size:
                releasable.append(heap)
                released_size += heap.total_size
        for heap in releasable:
            self.release_heap(pool, heap)
        return released_size

    def release_cached_buffers(self):
        for pool in (self.small, self.large):
            self.release_free_heaps(pool, UNLIMITED)
        return True

    def garbage_collect_cached_buffers(self, pool):
        if self.current_allocated_size() >= self.low:
            self.release_free_heaps(pool, self.current_allocated_size() - self.low)

    def malloc(self, size):
        """Return the block of `size` bytes, None if memory is out."""
        alloc_size = self.get_allocation_size(size)
        pool = self.get_pool(alloc_size)
        pressure = pool is self.large and self.low_watermark_value() <= 0
        block = self.get_free_buffer(pool, alloc_size)
        if block is None:
            if pressure and alloc_size < pool.available_size:
                self.garbage_collect_cached_buffers(pool)
            block = (
                self.alloc_heap(pool, alloc_size, pressure)
                or self.get_free_buffer(pool, alloc_size)
                or (self.release_free_heaps(pool, alloc_size) and self.alloc_heap(pool, alloc_size, pressure))
                or (
                    self.release_cached_buffers()
                    and (self.get_free_buffer(pool, alloc_size) or self.alloc_heap(pool, alloc_size, pressure))
                )
                or None
            )
        if block is None:
            return None
        block.in_use = True
        self.current_allocated_memory += block.size
        self.peak_current_allocated_memory = max(self.peak_current_allocated_memory, self.current_allocated_memory)
        return block

    def free(self, block):
        pool = self.small if block.heap in self.small.heaps else self.large
        pool.available_buffers.append(block)
        pool.available_size += block.size
        self.current_allocated_memory -= block.size
        block.in_use = False
        block.heap.free_bytes += block.size
        block.heap.max_free_run = block.heap.free_bytes

    def empty_cache(self):
        self.release_cached_buffers()


class Both:
    """The model and the source side by side; every event asserts that they agree."""

    def __init__(self, *, high=None, low=None, others=0, max_buffer=None):
        self.limits = MetalLimits(high=high, low=low, others=others)
        self.model = PlacementHeaps(max_buffer=max_buffer)
        known = {"high": high, "low": low, "max_buffer_size": max_buffer}
        given_here = {name: value for name, value in known.items() if value is not None}
        self.source = MPSHeapAllocatorImpl(others=others, **given_here)
        self.live, self.places = [], {}

    def take(self, size):
        """Return (heap, offset, size) of a block, with heaps counted from 1; None if memory is out."""
        rounded = self.model.rounded(size)
        assert rounded == self.source.get_allocation_size(size)
        mine, theirs = self.model.take(rounded, self.limits), self.source.malloc(size)
        self.agree()
        assert (mine is None) == (theirs is None)
        if mine is None:
            return None
        self.live.append((mine, theirs))
        place = (mine.at >> 48, mine.at % (1 << 48), mine.size)
        assert place == (theirs.heap.heap_id, theirs.offset, theirs.size)
        return place

    def free(self, index):
        mine, theirs = self.live.pop(index)
        self.model.give_back(mine)
        self.source.free(theirs)
        self.agree()

    def empty_cache(self):
        self.model.release()
        self.source.empty_cache()
        self.agree()

    def agree(self):
        assert self.model.reserved == self.source.total_allocated_memory
        assert self.model.reserved >= sum(mine.size for mine, _ in self.live)
