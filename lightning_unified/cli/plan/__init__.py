"""The `plan` command: the peak of a training step before there is one, and the best plan that fits."""
