"""A fake copy whose parameters are sharded by torch's FSDP2 code, with collectives that only leave a note.

torch's own code gathers, frees and reduces, so its buffers and their lifetimes are recorded as those of any other operation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from typing_extensions import override

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.cost_model.rates.links import gathered_bytes
from lightning_unified.errors import DryRunError
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.step.sharding.wrapping import is_sharded, shard

__all__ = ["resizes_noted", "shard_copy"]

_STEPS = ("training_step", "validation_step")
"""Methods that run the root's forward hooks; Lightning calls them instead of `forward`."""


def shard_copy(module: L.LightningModule, *, devices: int, recorder: Recorder) -> None:
    """Shard a fake copy over the process group; call it inside `fake_group(devices)` and the fake world.

    Raises:
        DryRunError: If there is no group of that many ranks, or the module is sharded already.
    """
    if not dist.is_initialized() or dist.get_world_size() != devices:
        raise DryRunError(f"a step of {devices} ranks is traced inside a process group of {devices} ranks.")
    if is_sharded(module):
        raise DryRunError(f"{type(module).__name__} is sharded already; give the module as it was before.")
    if is_overridden("configure_model", module):
        module._device_mesh = _mesh_of_lightning(devices)  # type: ignore[assignment]
        module.configure_model()
    if not is_sharded(module):
        shard(module, init_device_mesh("cpu", (devices,)))
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_custom_all_gather(_NotedAllGather(recorder))
            child.set_custom_reduce_scatter(_NotedReduceScatter(recorder))
    for name in _STEPS if isinstance(module, FSDPModule) else ():
        register_fsdp_forward_method(module, name)


def _mesh_of_lightning(devices: int) -> DeviceMesh:
    """Return the mesh that a module's `configure_model` reads, as `ModelParallelStrategy` makes it.

    Raises:
        DryRunError: In a process that is one of several real ranks, because all of them make such a mesh together.
    """
    if dist.get_backend() != "fake":
        raise DryRunError("a module that shards itself in configure_model is traced in a process of its own.")
    return init_device_mesh("cpu", (devices, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))


@contextmanager
def resizes_noted(recorder: Recorder) -> Iterator[None]:
    """Record storages that are freed and filled again in place, as FSDP2 does with gathered parameters.

    Source:
        torch/distributed/fsdp/_fully_shard/_fsdp_param.py: `alloc_storage` and `free_storage`, torch 2.13.
    """
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, count: int) -> Any:
        result = resize(storage, count)
        recorder.note_resized(storage, "gathered weights")
        return result

    with replaced(torch.UntypedStorage, "resize_", noted):
        yield


class _Noted:
    """Allocates the buffers of a collective operation, and marks them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._recorder.mark([buffer], "communication")
        return buffer

    def _note(self, name: str, whole: Tensor, group: dist.ProcessGroup) -> None:
        sent = gathered_bytes(whole.numel() * whole.element_size(), ranks=group.size())
        self._recorder.note_collective(name, sent=sent)


class _NotedAllGather(_Noted, AllGather):
    """An all-gather that transfers nothing."""

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._note("all-gather", output_tensor, group)


class _NotedReduceScatter(_Noted, ReduceScatter):
    """A reduce-scatter that transfers nothing."""

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._note("reduce-scatter", input_tensor, group)
