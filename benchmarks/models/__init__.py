"""Memory, speed and quality of the models that ship with the package."""
