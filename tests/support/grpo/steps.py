"""Loaders, strategies and callbacks that tests of GRPO's steps share."""

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.models.grpo import RolloutBuffer
from tests.support.grpo.training import prompts
from tests.support.lasting import Lasting

TWO = [prompts(), prompts(first=4, seed=5)]


class Logged(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Fails(Callback):
    """Runs out of memory once, in the forward pass of a step that has prepared its batch."""

    raised = Lasting()

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            handle = pl_module.policy.model.layers[-1].register_forward_hook(lambda *_: self._raise(pl_module, handle))

    def _raise(self, module, handle):
        if torch.is_grad_enabled():
            handle.remove()
            self.raised += 1
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
            )


def loader_of(batches, *, inner=1):
    loader = DataLoader(batches, batch_size=None)
    return loader if inner == 1 else RolloutBuffer(loader, inner_iterations=inner)


def splitting(size):
    return UnifiedStrategy(micro_batch_size=size, predict=False)


def weights_of(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])


def mean_cross_entropy(model, *batches):
    logits = [model(input_ids=batch["tokens"]).logits[:, :-1].flatten(0, 1) for batch in batches]
    labels = [batch["labels"][:, 1:].flatten() for batch in batches]
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
