"""The plan of a fit, made from its first batch and applied before that batch runs."""
