"""The reference policy: the policy at the beginning of GRPO."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_unified.models.causal_lm.language_model import evaluating
from lightning_unified.models.pretrained.adapters import adapter_layers, adapters_off

__all__ = ["Reference"]


class Reference(nn.Module):
    """Hold a policy's earlier weights, and run the policy with them.

    Untrained low-rank adapters change nothing. The reference is then the model with its adapters off, and nothing is copied.
    Otherwise trained weights are copied: adapters after supervised steps, or the whole model. Frozen weights are shared. The
    copies are parameters without gradients, in the module's state dict.

    Attributes:
        kind: "none" before `begin`, then "adapters off" or "copy".
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "none"
        self._names: list[str] = []

    def begin(self, policy: nn.Module, *, is_trained: bool | None = None) -> None:
        """Make the present policy the reference; later calls do nothing.

        Args:
            policy: The model.
            is_trained: Whether its adapters have changed; None checks their values.
        """
        if self.kind != "none":
            return
        trained = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        if _are_adapters(policy, trained) and not (_have_changed(trained) if is_trained is None else is_trained):
            self.kind = "adapters off"
        else:
            self._hold(list(trained), [value.detach().clone() for value in trained.values()])

    @contextmanager
    def on(self, policy: nn.Module) -> Iterator[None]:
        """Run `policy` with the reference's weights in eval mode inside the context.

        Raises:
            RuntimeError: If `begin` was not called.
        """
        if self.kind == "none":
            raise RuntimeError("there is no reference yet: begin(policy) takes the policy as it is.")
        with evaluating(policy), adapters_off(policy) if self.kind == "adapters off" else self._swapped(policy):
            yield

    def state(self) -> dict[str, Any]:
        """Return the plain values that `restore` needs beside the state dict."""
        return {"kind": self.kind, "names": list(self._names)}

    def restore(self, state: Mapping[str, Any], policy: nn.Module) -> None:
        """Restore a checkpoint's state, with empty copies that `load_state_dict` then fills.

        Raises:
            ValueError: If the policy has no such weights.
        """
        own = dict(policy.named_parameters())
        if unknown := [name for name in state["names"] if name not in own]:
            raise ValueError(
                f"the checkpoint's reference has {len(unknown)} weights that this policy has not, the first {unknown[0]}; build "
                "the module with the adapters it was trained with."
            )
        self.kind = state["kind"]
        if self.kind == "copy":
            self._hold(list(state["names"]), [torch.empty_like(own[name]) for name in state["names"]])

    def _hold(self, names: list[str], values: list[torch.Tensor]) -> None:
        self.kind, self._names = "copy", names
        for index, value in enumerate(values):
            self.register_parameter(f"copy_{index}", nn.Parameter(value, requires_grad=False))

    @contextmanager
    def _swapped(self, policy: nn.Module) -> Iterator[None]:
        own = dict(policy.named_parameters())
        copies = {id(own[name]): copy for name, copy in zip(self._names, self.parameters(), strict=True)}
        places = [  # tied weights have several
            (module._parameters, leaf, value)
            for module in policy.modules()
            for leaf, value in module._parameters.items()
            if id(value) in copies
        ]
        try:
            for parameters, leaf, value in places:
                parameters[leaf] = copies[id(value)]
            yield
        finally:
            for parameters, leaf, value in places:
                parameters[leaf] = value

    @override
    def forward(self) -> None:
        raise NotImplementedError("a reference runs the policy: with reference.on(policy): policy(...)")


def _are_adapters(policy: nn.Module, trained: Mapping[str, nn.Parameter]) -> bool:
    """Return whether only low-rank adapters are trained."""
    return bool(trained) and bool(adapter_layers(policy)) and all(".lora_" in name for name in trained)


def _have_changed(adapters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether an adapter's second matrix is not zero; new ones are all zero."""
    return any(
        bool(value.any()) for name, value in adapters.items() if ".lora_B." in name or ".lora_embedding_B." in name
    )
