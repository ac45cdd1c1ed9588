"""Checkpoints of sharded modules: one file with whole tensors, which any number of ranks reads."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.files.mapped import giving_back
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.sharding.rows import gathered, sharded_like

__all__ = ["ShardedState"]


class ShardedState(DDPStrategy):
    """Saves and loads the whole tensors of a sharded module and its optimizers.

    Files have the format of a run on one device: runs on another number of ranks, or with another strategy, go on from them.
    All ranks take part in saving. The first one gets the whole tensors, one by one, on the host. If a rank has no memory for
    its part, all of them raise.
    """

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run."""
        raise NotImplementedError

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Set up without `DistributedDataParallel`, whose ranks hold equal parameters."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._set_up_model(trainer)

    def _set_up_model(self, trainer: L.Trainer) -> None:
        """Move the sharded module to its device, and set up its optimizers."""
        raise NotImplementedError

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with whole tensors on the first rank; an empty one on the others."""
        assert self.lightning_module is not None
        whole = _Whole(self.ranks)
        state = {name: whole.value(value) for name, value in self.lightning_module.state_dict().items()}
        return state if self.is_global_zero else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with whole tensors on the first rank; an empty one on the others."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        whole = _Whole(self.ranks)
        state = optimizer.state_dict()
        entries = {
            key: {name: whole.value(value) for name, value in entry.items()} if isinstance(entry, dict) else entry
            for key, entry in state["state"].items()
        }
        return {**state, "state": entries} if self.is_global_zero else {"state": {}, "param_groups": []}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        likes = module.state_dict(keep_vars=True)
        with giving_back():
            state = {name: self._own(value, likes.get(name)) for name, value in checkpoint["state_dict"].items()}
            module.load_state_dict(state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with giving_back():
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                saved = [key for group in state["param_groups"] for key in group["params"]]
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                likes = dict(zip(saved, held, strict=False))
                entries = {
                    key: {name: self._own(value, likes.get(key)) for name, value in entry.items()}
                    if isinstance(entry, dict)
                    else entry
                    for key, entry in state["state"].items()
                }
                optimizer.load_state_dict({**state, "state": entries})

    def _own(self, value: Any, like: Any) -> Any:
        """Return this rank's part of a whole tensor whose parameter is `like`; any other value as it is."""
        if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return sharded_like(value, like, self.ranks)


class _Whole:
    """Gathers each sharded tensor once; a tied one has several names."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {}  # with the tensor, so that its id stays its own

    def value(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        key = id(value._local_tensor)
        if key not in self._known:
            whole = gathered(value, self._ranks, wanted=self._ranks.rank == 0)
            self._known[key] = (value._local_tensor, whole)
        return self._known[key][1]
