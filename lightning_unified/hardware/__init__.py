"""F1: what the machine has and can do. Nothing here imports torch until something is read."""
