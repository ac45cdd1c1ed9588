"""Memory pressure: `PressureGuard`, its sampling thread, and the detection of thrashing."""
