"""Encoders of a loss over pairs, run in checkpointed chunks of rows inside one step."""

from lightning_unified.step.encoders.chunked import Encoders, encoders_of

__all__ = ["Encoders", "encoders_of"]
