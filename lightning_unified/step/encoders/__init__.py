"""Run the encoders of a loss over pairs in checkpointed chunks of rows inside one step."""

from lightning_unified.step.encoders.chunked import Encoders, encoders_of

__all__ = ["Encoders", "encoders_of"]
