"""The `plan` command: predict the peak of a training step, and choose the best plan that fits."""
