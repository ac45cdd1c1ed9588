"""Readers of the operating system: RAM, the limits of control groups, page counters."""
