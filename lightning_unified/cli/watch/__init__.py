"""The `watch` command: what uses the machine's memory now, and how the runs of this package stand."""
