"""Checkpoints of sharded modules: a folder with pieces, or one file with whole tensors.

Any number of ranks reads either.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.files.atomic import put_back
from lightning_unified.files.mapped import giving_back
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO, is_local, load_folder
from lightning_unified.step.sharding.rows import empty_like_shard, gathered, sharded_like

__all__ = ["ShardedState"]


class ShardedState(DDPStrategy):
    """Saves and loads a sharded module and its optimizers.

    A distributed checkpoint is a folder, into which each rank writes its own rows. A file has the format of a run on one device: all
    ranks take part in saving it, and the first one gets the whole tensors, one by one, on the host. If a rank cannot write its part,
    all of them raise. Runs on another number of ranks, or with another strategy, go on from either.
    """

    _saves_folders: bool

    @property
    def ranks(self) -> Ranks:
        """All ranks of the run."""
        raise NotImplementedError

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Set up without `DistributedDataParallel`, whose ranks hold equal parameters."""
        assert self.accelerator is not None
        self._refuse_plugin()
        self.accelerator.setup(trainer)
        self._set_up_model(trainer)

    def _set_up_model(self, trainer: L.Trainer) -> None:
        """Move the sharded module to its device, and set up its optimizers."""
        raise NotImplementedError

    def _shard_of(self, tensor: Tensor) -> Tensor:
        """Return the sharded parameter of one that is whole at present; any other tensor as it is."""
        raise NotImplementedError

    def _write_back(self) -> None:
        """Write to shards what hooks have written to whole parameters."""
        raise NotImplementedError

    def _refuse_plugin(self) -> None:
        plugin = self._checkpoint_io
        if self._saves_folders and plugin is not None and not isinstance(plugin, AtomicCheckpointIO):
            raise ConfigurationError(
                f"{type(plugin).__name__} writes one file, and a distributed checkpoint is a folder that torch.distributed.checkpoint writes; "
                "give save_distributed_checkpoint=False, or leave the plugin out."
            )

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's rows of the module's state.

        For a file, return whole tensors on the first rank, and nothing on the others.
        """
        assert self.lightning_module is not None
        self._write_back()
        if self._saves_folders:
            return self._shards_by_name(self.lightning_module)
        whole = _Whole(self.ranks)
        state = {name: whole.value(value) for name, value in self.lightning_module.state_dict().items()}
        return state if self.is_global_zero else {}

    def _shards_by_name(self, module: L.LightningModule) -> dict[str, Any]:
        shards: dict[int, Tensor] = {}  # a tied parameter stays one tensor
        state = module.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = shards.setdefault(id(value), self._shard_of(value).detach())
        return dict(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's rows of the optimizer's state.

        For a file, return whole tensors on the first rank, and nothing on the others.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state = optimizer.state_dict()
        if self._saves_folders:
            return state
        whole = _Whole(self.ranks)
        entries = {
            key: {name: whole.value(value) for name, value in entry.items()} if isinstance(entry, dict) else entry
            for key, entry in state["state"].items()
        }
        return {**state, "state": entries} if self.is_global_zero else {"state": {}, "param_groups": []}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a distributed checkpoint together, or a file on the first rank; all ranks call it.

        Raises:
            CheckpointError: If a rank could not write its part; an earlier checkpoint of that name is still there.
        """
        if not self._saves_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None or not is_local(filepath):
            raise CheckpointError(
                f"{filepath}: a distributed checkpoint is a folder that all machines share, without storage_options; name such a folder, or "
                "give save_distributed_checkpoint=False."
            )
        from lightning_unified.step.sharding.saving import save_folder

        save_folder(checkpoint, filepath, self.ranks, device=self.root_device)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint; of a folder, each rank reads the rows that it holds."""
        if not is_local(checkpoint_path) or not put_back(Path(checkpoint_path)) or not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        assert self.lightning_module is not None
        held: dict[tuple[Any, ...], Tensor] = {
            ("state_dict", name): value for name, value in self.lightning_module.state_dict(keep_vars=True).items()
        }
        for number, optimizer in enumerate(self.optimizers):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            held |= {("optimizer_states", number, "state", key): parameter for key, parameter in enumerate(parameters)}

        def target_of(place: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            like = held.get(place[:2] if place[0] == "state_dict" else place[:4])
            like = self._shard_of(like) if isinstance(like, Tensor) else None
            return empty_like_shard(like, dtype) if isinstance(like, DTensor) and like.shape == shape else None

        with self.ranks.reporting_errors():
            return load_folder(
                checkpoint_path,
                weights_only=weights_only,
                target_of=target_of,
                with_optimizers=bool(self.optimizers),
            )

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
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        if not isinstance(like, DTensor) or value.shape != like.shape:
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
