"""From dry runs to decisions: what a step needs at any size, which setting is fastest, and the plan of a running fit."""
