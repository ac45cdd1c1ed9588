"""Objects with private names that the source uses, and calls as the source makes them.

docs/explanation/private_apis.md lists the names by the classes of these objects.
"""

from functools import cache
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchmetrics import MeanMetric


@cache
def example(kind: str) -> Any:
    """Return an object whose class is called `kind`, as a fit has it."""
    return _MAKERS[kind]()


def _trainer() -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(BoringModel(), DataLoader(torch.zeros(2, 32)))  # type: ignore[arg-type]
    return trainer


def _tuner_layer() -> Any:
    import pytest

    return pytest.importorskip("peft.tuners.tuners_utils").BaseTunerLayer


def _transformers(name: str) -> Any:
    import pytest

    transformers = pytest.importorskip("transformers")
    return transformers.BertConfig() if name == "PretrainedConfig" else transformers.BertModel


@cache
def _sharded() -> Any:
    """Return a sharded module after a forward pass, over two ranks that exist in this process only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lightning_unified.planner.ranks.fake_group import fake_group

    with fake_group(2):
        module = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (2,)))
        module(torch.zeros(1, 2))
        module.reshard()
    return module


def _group_of_parameters() -> Any:
    return _sharded()._get_fsdp_state()._fsdp_param_group


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # torch's own order
        return value.clone()


def _node() -> Any:
    return _Same.apply(torch.ones(1, requires_grad=True)).grad_fn


_MAKERS: dict[str, Any] = {
    "AdamW": lambda: torch.optim.AdamW(nn.Linear(1, 1).parameters(), fused=True),
    "Autocast": lambda: torch.autocast("cpu"),
    "BatchSamplerWrapper": lambda: _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(2)), 1, False)),
    "BackwardCFunction": _node,
    "BaseTunerLayer": _tuner_layer,
    "CSVLogger": lambda: CSVLogger("unused"),
    "Closure": lambda: Closure(lambda: None, None, None),  # type: ignore[arg-type]
    "CombinedLoader": lambda: CombinedLoader([]),
    "DDPStrategy": DDPStrategy,
    "DTensor": lambda: next(_sharded().parameters()),
    "DataLoader": lambda: DataLoader([0]),  # type: ignore[arg-type]
    "FSDPModule": _sharded,
    "FSDPParam": lambda: _group_of_parameters().fsdp_params[0],
    "FSDPParamGroup": _group_of_parameters,
    "FSDPState": lambda: _sharded()._get_fsdp_state(),
    "GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "LightningModule": L.LightningModule,
    "LightningOptimizer": lambda: LightningOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
    "Metric": MeanMetric,
    "ModelCheckpoint": ModelCheckpoint,
    "Module": lambda: nn.Linear(1, 1),
    "Node": lambda: (torch.zeros(1, requires_grad=True) * 2).grad_fn,
    "OptimizedModule": lambda: torch.compile(nn.Linear(1, 1)),
    "DynamoCallback": lambda: torch._dynamo.optimize("eager").callback,
    "OpOverload": lambda: torch.ops.aten.add.Tensor,
    "Parameter": lambda: nn.Parameter(torch.zeros(1)),
    "PreTrainedModel": lambda: _transformers("PreTrainedModel"),
    "PretrainedConfig": lambda: _transformers("PretrainedConfig"),
    "RNN": lambda: nn.RNN(1, 1),
    "RandomState": lambda: np.random.RandomState(0),
    "ScriptModule": lambda: torch.jit.script(nn.ReLU()),
    "SparseTensor": lambda: torch.eye(2).to_sparse(),
    "Storage": lambda: torch.zeros(1).untyped_storage(),
    "Tensor": lambda: torch.zeros(1),
    "Trainer": _trainer,
}
# Set by users or by a later version: the source asks whether they exist.
OPTIONAL = {
    "Module._ddp_params_and_buffers_to_ignore": "set by a user",
    "argparse._ActionsContainer._check_help": "since Python 3.14",
    "torch._C._accelerator_isAllocatorInitialized": "since torch 2.12",
    "torch._C._cuda_clearCublasWorkspaces": "in torch with CUDA or ROCm",
    "AdamW._need_device_dtype_check_for_fused": "set by the optimizer's first step",
    "FSDPState._fsdp_param_groups": "since torch 2.13",
    "FSDPState._comm_ctx._last_post_reduce_events": "since torch 2.13",
    "FSDPParamGroup._partial_reduce_output_layout": "since torch 2.15",
    "FSDPParamGroup._post_backward_pending": "since torch 2.15",
    "FSDPParamGroup._set_unsharded_grad_dtypes": "since torch 2.15",
}
_AUTOMATIC = "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization"
_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"
# Positional arguments and keywords of the calls in the source; `self` of a method counts.
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    f"{_AUTOMATIC}._make_step_fn": (2, ()),
    f"{_AUTOMATIC}._make_zero_grad_fn": (3, ()),
    f"{_AUTOMATIC}._training_step": (2, ()),
    "lightning.pytorch.trainer.call._call_strategy_hook": (5, ()),
    "lightning.pytorch.trainer.connectors.data_connector._DataHookSelector": (2, ()),
    f"{_RESULT}._ResultCollection": (1, ()),
    "lightning.fabric.utilities.cloud_io._is_local_file_protocol": (1, ()),
    "lightning.fabric.utilities.seed._collect_rng_states": (0, ("include_cuda",)),
    "lightning.fabric.utilities.seed._set_rng_states": (1, ()),
    "hydra._internal.utils.get_args_parser": (0, ()),
    "Trainer.fit_loop._should_accumulate": (0, ()),
    "Trainer.fit_loop.epoch_loop._should_check_val_fx": (1, ()),
    "BaseTunerLayer._cast_input_dtype": (3, ()),
    "FSDPModule._get_fsdp_state": (0, ()),
    "FSDPParamGroup._to_sharded": (0, ()),
    "FSDPState._lazy_init": (0, ()),
    "Trainer.precision_plugin._wrap_closure": (3, ()),
    "Metric._reduce_states": (1, ()),
    "Module._call_impl": (3, ()),
    "torch.nn.Module._apply": (2, ("recurse",)),
    "torch.nn.modules.module._has_any_global_hook": (0, ()),
    "torch.amp.grad_scaler._refresh_per_optimizer_state": (0, ()),
    "torch.distributed.distributed_c10d._get_default_store": (0, ()),
    "torch.utils._device._device_constructors": (0, ()),
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": (0, ()),
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices": (0, ()),
    "torch.utils._python_dispatch._disable_current_modes": (0, ()),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": (1, ()),
    "torch.utils._pytree.tree_flatten": (1, ()),
    "torch.utils._pytree.tree_leaves": (1, ()),
    "torch.utils._pytree.tree_map_only": (3, ()),
    "torch.utils._pytree.tree_unflatten": (2, ()),
    "torch._guards.detect_fake_mode": (0, ()),
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": (1, ()),
    "torch._utils._unflatten_dense_tensors": (2, ()),
    "torch._disable_dynamo": (1, ()),
    "torch._dynamo.maybe_mark_dynamic": (2, ()),
    "torch._dynamo.eval_frame._callback_from_stance": (1, ()),
    "torch._inductor.decomposition.select_decomp_table": (0, ()),
    "torch.nn.utils.stateless._reparametrize_module": (2, ("tie_weights",)),
}
# Functions in C have no signature: the results of the calls in the source, on an example.
RESULTS: dict[str, Any] = {
    "torch._C._len_torch_dispatch_stack": lambda call: call() == 0,
    "torch._C._len_torch_function_stack": lambda call: call() == 0,
    "torch._C._functorch.maybe_current_level": lambda call: call() is None,
    "torch._C._autograd._top_saved_tensors_default_hooks": lambda call: call(True) is None,
    "torch._C._current_autograd_node": lambda call: call() is None,
    "torch._C._dispatch_get_all_op_names": lambda call: "aten::add.Tensor" in call(),
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda call: call("aten::add.Tensor", "CPU"),
    "torch._C._has_storage": lambda call: call(torch.zeros(1)),
    "torch._C._storage_Use_Count": lambda call: call(example("Storage")._cdata) >= 1,
    "torch.autograd._get_sequence_nr": lambda call: call() >= 0,
    "torch.utils._mode_utils.no_dispatch": lambda call: hasattr(call(), "__enter__"),
    "SparseTensor._values": lambda call: call().tolist() == [1, 1],
    "Tensor._is_view": lambda call: call() is False,
}
