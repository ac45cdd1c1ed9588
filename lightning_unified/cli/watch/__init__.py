"""The `watch` command: the machine's memory and the runs of this package, live."""
