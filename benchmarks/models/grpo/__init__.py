"""GRPO: an iteration beside TRL's."""
