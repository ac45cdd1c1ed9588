"""GearHead: memory of a training step."""
