"""Signs that a run is short of memory: pressure, thrashing, and allocator caches worth clearing."""
