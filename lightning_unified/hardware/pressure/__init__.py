"""Signs that a run is short of memory: pressure, thrashing, caches worth clearing."""
