"""Checkpoints without the frozen weights that were read from files, and how to load them."""

from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import nn

from lightning_unified.models.choices import inference_device
from lightning_unified.models.plain_checkpoint import load_weights, read_trained
from lightning_unified.models.pretrained.architecture import architecture_of

__all__ = ["FrozenWeights", "load_trained"]

_Module = TypeVar("_Module", bound=LightningModule)


class FrozenWeights:
    """Leave frozen weights out of a module's checkpoints, and put them back.

    A module with adapters beside weights from a file saves the adapters only. Any other module saves all weights and its
    architecture, so that the checkpoint needs no file.

    Args:
        policy: The language model; its names in the module's state dict begin with `policy.`.
        are_left_out: Whether the frozen weights come from a file.
    """

    def __init__(self, policy: nn.Module, *, are_left_out: bool) -> None:
        self._policy, self.are_left_out = policy, are_left_out

    def names(self) -> list[str]:
        """Return the names in the state dict of the tensors that are not trained."""
        trained = {id(one) for one in self._policy.parameters() if one.requires_grad}
        held = self._policy.state_dict(prefix="policy.", keep_vars=True)
        return [name for name, value in held.items() if id(value) not in trained]

    def leave_out(self, checkpoint: dict[str, Any]) -> None:
        """Remove the frozen weights from a checkpoint, or else add the architecture to it."""
        if self.are_left_out:
            for name in self.names():
                checkpoint["state_dict"].pop(name, None)
        else:
            own = {"architecture": architecture_of(self._policy), "load_pretrained": False}
            checkpoint["hyper_parameters"] = {**checkpoint.get("hyper_parameters", {}), **own}

    def put_back(self, checkpoint: dict[str, Any], *, is_complete: bool) -> None:
        """Add the policy's own frozen weights to a checkpoint that lacks them.

        Raises:
            ValueError: If it lacks weights that this model has not read.
        """
        if is_complete:
            return
        if not self.are_left_out:
            raise ValueError(
                "this checkpoint holds adapters only, and the model beside them has not read its weights; leave "
                "load_pretrained=true and give the model and the adapters it was trained with."
            )
        own = self._policy.state_dict(prefix="policy.")
        checkpoint["state_dict"].update({name: own[name] for name in self.names()})


def load_trained(kind: type[_Module], path: str | Path, *, model: str, untrained: str, device: str) -> _Module:
    """Load the module in a checkpoint, in eval mode.

    Args:
        kind: The module's class; its arguments are the checkpoint's hyperparameters.
        path: The `.ckpt` file.
        model: Key of the model's own part of the checkpoint.
        untrained: The behaviour of an untrained model, for the message.
        device: "cpu", "cuda", "mps" or "auto": the available accelerator, else the CPU.

    Raises:
        FileNotFoundError: If there is no such file, or weights that it leaves out are not found.
        RuntimeError: If it is damaged, belongs to another model, was saved before the first training step, or does not fit together.
    """
    saved = read_trained(path, model=model, untrained=untrained)
    # Lightning's own entries begin with an underscore
    module = kind(**{name: value for name, value in saved["hyper_parameters"].items() if not name.startswith("_")})
    module.on_load_checkpoint(saved)
    load_weights(module, saved["state_dict"], path=path)
    return module.to(inference_device(device)).eval()
