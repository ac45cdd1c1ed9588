"""A fake copy that torch's FSDP2 code shards, with collectives that only leave a note.

torch's own code gathers, frees and reduces, so its buffers and their lifetimes are recorded as those of any other operation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.cost_model.rates.links import gathered_bytes
from lightning_unified.errors import DryRunError
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.planner.ranks.held import held_shards
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.sharding.wrapping import Wrapping, is_sharded, shard

__all__ = ["Sharding", "shard_copy", "sharding_followed"]

_STEPS = ("training_step", "validation_step")
"""Methods that run the root's forward hooks; Lightning calls them instead of `forward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a module is divided over ranks.

    Attributes:
        devices: The number of ranks.
        hold: `"parameters"` if a rank of `unified_fsdp` holds whole parameters and gradients during a step, `"shards"` if it gathers one
            block at a time; None for FSDP2 alone, without scratch memory and copies for a recovery.
        mesh: The ranks of a running fit, as `fake_mesh` returns them. None for a module that no strategy has sharded yet, in
            `fake_group`.
        wrapping: The groups in which the running fit has sharded its module; None if `configure_model` has sharded it in a way that
            is not known.
    """

    devices: int
    hold: Literal["parameters", "shards"] | None = None
    mesh: DeviceMesh | None = None
    wrapping: Wrapping | None = None


def shard_copy(module: L.LightningModule, sharding: Sharding, recorder: Recorder) -> WholeShards | KeptShards | None:
    """Shard a fake copy over fake ranks; call it inside the fake world.

    Without a mesh of a running fit, call it inside `fake_group` too.

    Returns:
        What a rank of `unified_fsdp` holds during a step; None for FSDP2 alone.

    Raises:
        DryRunError: If there is no fake group of that many ranks, or the module is sharded in a way that is not known.
    """
    if sharding.mesh is None:
        mesh = _shard_before_fit(module, devices=sharding.devices)
    else:
        mesh = _shard_as_in_fit(module, sharding, sharding.mesh)
    for name in _STEPS if isinstance(module, FSDPModule) else ():
        register_fsdp_forward_method(module, name)
    whole = sharding.hold == "parameters"
    held = None if sharding.hold is None else held_shards(module, mesh, whole=whole, recorder=recorder)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_custom_all_gather(_NotedAllGather(recorder, overlaps=not whole))  # pyright: ignore[reportArgumentType]
            child.set_custom_reduce_scatter(_NotedReduceScatter(recorder, overlaps=not whole))  # pyright: ignore[reportArgumentType]
    return held


def _shard_before_fit(module: L.LightningModule, *, devices: int) -> DeviceMesh:
    """Shard a copy of a module that no strategy has sharded yet, as the strategy will do."""
    if not dist.is_initialized() or dist.get_world_size() != devices or dist.get_backend() != "fake":
        raise DryRunError(
            f"a step of {devices} sharded ranks is traced in a process that is not one of several real ranks."
        )
    if is_sharded(module):
        raise DryRunError(f"{type(module).__name__} is sharded already; give the module as it was before.")
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("data_parallel",))
    module._device_mesh = mesh
    if is_overridden("configure_model", module):
        module.configure_model()
    if not is_sharded(module):
        shard(module, mesh)
    return mesh


def _shard_as_in_fit(module: L.LightningModule, sharding: Sharding, mesh: DeviceMesh) -> DeviceMesh:
    """Shard a copy as a running fit has sharded its module, whose `configure_model` has run."""
    if sharding.wrapping is None:
        raise DryRunError(
            f"configure_model of {type(module).__name__} shards it in a way that a dry run does not repeat: it gives fully_shard more than a "
            "mesh, or leaves the module itself out"
        )
    module._device_mesh = mesh
    shard(module, mesh, sharding.wrapping)
    return mesh


@contextmanager
def sharding_followed(recorder: Recorder) -> Iterator[None]:
    """Record what a sharded step does to memory, and not what torch only computes shapes with.

    FSDP2 frees storages of gathered parameters and fills them again in place. `DTensor` runs an operation a second time on fake tensors
    of the whole shapes, to learn the shape of its result; inside a dry run these cannot be told from the step's own.

    Source:
        torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `alloc_storage` and `free_storage`; torch/distributed/tensor/_sharding_prop.py:
        `_propagate_tensor_meta_non_cached`; torch 2.11 to 2.13.
    """
    resize: Callable[..., Any] = torch.UntypedStorage.resize_
    propagate: Callable[..., Any] = ShardingPropagator._propagate_tensor_meta_non_cached

    def noted(storage: torch.UntypedStorage, count: int) -> Any:
        result = resize(storage, count)
        recorder.note_resized(storage, "gathered weights")
        return result

    def unrecorded(propagator: ShardingPropagator, *args: Any) -> Any:
        with recorder.paused(paused=True):
            return propagate(propagator, *args)

    with (
        replaced(torch.UntypedStorage, "resize_", noted),
        replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unrecorded),
    ):
        yield


class _Noted:
    """Allocates the buffers of a collective operation, and marks them."""

    def __init__(self, recorder: Recorder, *, overlaps: bool) -> None:
        self._recorder, self._overlaps = recorder, overlaps

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._recorder.mark([buffer], "communication")
        return buffer

    def _note(self, name: str, whole: Tensor, group: dist.ProcessGroup) -> None:
        sent = gathered_bytes(whole.numel() * whole.element_size(), ranks=group.size())
        self._recorder.note_collective(name, sent=sent, overlaps=self._overlaps)


class _NotedAllGather(_Noted):
    """An all-gather that transfers nothing."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        del input_tensor, async_op  # FSDP2 gives them by name
        self._note("all-gather", output_tensor, group)


class _NotedReduceScatter(_Noted):
    """A reduce-scatter that transfers nothing."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        del output_tensor, op, async_op  # FSDP2 gives them by name
        self._note("reduce-scatter", input_tensor, group)
