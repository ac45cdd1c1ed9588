"""Protocol of models that write sample texts after training."""

from typing import Protocol, runtime_checkable

__all__ = ["SampleWriter"]


@runtime_checkable
class SampleWriter(Protocol):
    """A module that writes a few texts after training, for a person to look at."""

    def write_samples(self, *, seed: int) -> list[str]:
        """Return texts of the model, the same for the same weights and `seed`; none if it cannot write any."""
        ...
