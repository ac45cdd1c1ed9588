"""The fake copy of a dry run's module."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.planner.dry_run.spec import StepSpec
from lightning_unified.planner.fake.fake_copy import fake_copy
from lightning_unified.step.sharding.unsharded import seen_unsharded

__all__ = ["fake_module", "vocabularies"]


def fake_module(
    spec: StepSpec, shared: list[Any], dtype: torch.dtype | None, *, device: torch.device
) -> L.LightningModule:
    """Return the fake copy of the module, in `dtype`; None keeps each tensor's own.

    A module that a running fit has sharded is copied as it was before.
    """
    module, sharding = spec.module, spec.sharding
    is_sharded = sharding is not None and sharding.mesh is not None
    with seen_unsharded(module) if is_sharded else nullcontext():
        copy = _copied(module, shared, dtype, device)
    copy.configure_callbacks = list  # type: ignore[method-assign]  # the module's own callbacks might write files
    copy._metric_attributes = None  # Lightning keeps the names of metrics by `id`, which differ in the copy
    for child in modules_of(copy):
        if "_device" in vars(child):
            child._device = device  # type: ignore[assignment]
    return copy


def _copied(
    module: L.LightningModule, shared: list[Any], dtype: torch.dtype | None, device: torch.device
) -> L.LightningModule:
    tensors = [*module.parameters(), *module.buffers()]
    cast = {} if dtype is None else {id(one): dtype for one in tensors if one.is_floating_point()}
    return fake_copy(module, device=device, cast=cast, shared=shared)


def vocabularies(module: nn.Module) -> set[int]:
    """Return the sizes of dimensions that mark a tensor as logits.

    These are the output size of the widest linear layer and the length of the longest embedding table, each if it is more than four times
    the other dimension.
    """
    linear = [layer for layer in modules_of(module) if isinstance(layer, nn.Linear)]
    tables = [table for table in modules_of(module) if isinstance(table, nn.Embedding)]
    widest = max(linear, key=lambda layer: layer.out_features, default=None)
    longest = max(tables, key=lambda table: table.num_embeddings, default=None)
    found: set[int] = set()
    if longest is not None and longest.num_embeddings > 4 * longest.embedding_dim:
        found.add(longest.num_embeddings)
    if widest is not None and widest.out_features > 4 * widest.in_features:
        found.add(widest.out_features)
    return found
