"""Memory of a step from its trace: live peak, lower bound, reserved bytes and limits."""
