"""Capture and restore all random generators of a process as tensors and plain values."""

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "gather", "restore"]


def capture(device_type: str, *, namespace: ModuleType = torch) -> dict[str, Any]:
    """Return the state of every random stream that a run on `device_type` draws from.

    Lightning's own function omits MPS and XPU, and Lightning's checkpoints hold no random state. The device's generators are
    read from host memory, so nothing waits for the device.

    Args:
        device_type: `cpu`, `cuda`, `mps` or `xpu`; other accelerators of the machine are not touched.
        namespace: Replaces torch, so that tests can imitate another accelerator.

    Returns:
        Tensors, numbers and None under the stream's name: safe for `torch.load(weights_only=True)`.

    Source:
        lightning/fabric/utilities/seed.py `_collect_rng_states` for the streams that Lightning collects (2.6.6).
    """
    # NumPy's global stream, not a Generator: modules and datasets draw from the global one.
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": namespace.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    if device_type == "mps":
        state["mps"] = [namespace.mps.get_rng_state()]
    elif device_type in {"cuda", "xpu"}:
        state[device_type] = [*getattr(namespace, device_type).get_rng_state_all()]
    return state


def restore(state: dict[str, Any], *, device_type: str, namespace: ModuleType = torch) -> list[str]:
    """Restore the states from `capture`, as far as this process has the same generators.

    Returns:
        The generators that could not be restored, in words; empty if all were.
    """
    namespace.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    if device_type == "cpu":
        return []
    if device_type not in state:
        return [f"the {device_type} generator: the checkpoint was written without one"]
    if device_type == "mps":
        namespace.mps.set_rng_state(state["mps"][0])
        return []
    module, saved = getattr(namespace, device_type), state[device_type]
    here = module.device_count()
    for index in range(min(here, len(saved))):
        module.set_rng_state(saved[index], index)
    return (
        [f"{device_type} generators {here} to {len(saved) - 1}: {here} devices are here"] if len(saved) > here else []
    )


def gather(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all ranks, in rank order; every rank must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states
