"""Resume from a mapped checkpoint: values leave the file's pages as they move into module and optimizers."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_unified.files.mapped import giving_back, owned, owned_below

__all__ = ["MappedResume"]


class MappedResume(Strategy):
    """Copies a checkpoint's weights and optimizer states piece by piece; no tensor stays in the file."""

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with giving_back():
            super().load_model_state_dict(checkpoint, strict=strict)
        assert self.lightning_module is not None
        for tensors in (self.lightning_module.parameters(), self.lightning_module.buffers()):
            for tensor in tensors:  # of a module that assigns what it loads
                tensor.data = owned(tensor.data)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with giving_back():
            super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            owned_below([*optimizer.state.values(), *optimizer.param_groups])
