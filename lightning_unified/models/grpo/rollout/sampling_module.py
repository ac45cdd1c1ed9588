"""Base of modules that sample completions: sampler, temperature, and cache between steps."""

from dataclasses import replace

from lightning.pytorch import LightningModule

from lightning_unified.models.grpo.rollout.sampler import SamplerSlot
from lightning_unified.models.grpo.rollout.sampling import CompletionSampler, SamplingOptions

__all__ = ["SamplingModule", "spare_bytes"]


class SamplingModule:
    """Sample completions with a sampler whose cache may stay between steps.

    The planner reads `kept_bytes`, and calls `give_back` where the budget has no room for the cache.

    Attributes:
        sampling: Number, length and distribution of completions.
    """

    sampling: SamplingOptions
    _slot: SamplerSlot

    @property
    def temperature(self) -> float:
        """Temperature at which completions are sampled and scored."""
        return self.sampling.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.sampling = replace(self.sampling, temperature=value)

    @property
    def sampler(self) -> CompletionSampler:
        """The sampler of completions."""
        return self._slot.sampler

    @property
    def kept_bytes(self) -> int:
        """Bytes of the sampler's cache between steps."""
        return self._slot.cache_bytes

    def give_back(self) -> None:
        """Free the sampler's cache; the next rollout allocates it again."""
        self._slot.release()


def spare_bytes(module: LightningModule) -> int | None:
    """Return the bytes that the plan leaves for the sampler's cache; None without plan or CUDA."""
    trainer = module._trainer if module.device.type == "cuda" else None
    return None if trainer is None else getattr(trainer.strategy, "spare_bytes", None)
