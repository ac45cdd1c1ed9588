"""Row-wise submodules that run in checkpointed chunks of rows inside one `training_step` on the whole batch."""

from lightning_unified.step.encoders.chunked import Encoders, encoders_of

__all__ = ["Encoders", "encoders_of"]
