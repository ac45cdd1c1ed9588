"""What a module generates before its step, by formula, beside what a step leaves on the device for the next one."""

from dataclasses import replace
from typing import Any

import lightning as L

from lightning_unified.cost_model.generation.networks import generation_before
from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.units import format_bytes

__all__ = ["with_generation"]


def with_generation(
    prediction: Prediction, module: L.LightningModule, batch: Any, *, precision: str
) -> tuple[Prediction, str]:
    """Return `prediction` with what is generated before the step, and that in words, empty where nothing is.

    While it generates there are no activations; gradients of the step before are still there, for Lightning drops them after the
    forward pass, and so is the optimizer's state.

    Args:
        prediction: Of the step.
        module: Whose step it is.
        batch: A whole batch.
        precision: Lightning's name.
    """
    try:
        found = generation_before(module, batch, precision=precision)
    except ValueError as error:
        return prediction, f"not predicted: {error}"
    if found is None:
        return prediction, ""
    beside = static_bytes(module)["gradients"] + prediction.categories.get("optimizer state", 0)
    reason = (
        f"{found.rows} rows of {found.prompt} + {found.new} tokens before the step: {format_bytes(found.bytes.peak_bytes)}, of which "
        f"{format_bytes(found.bytes.cache)} keys and values; with gradients and optimizer state {format_bytes(found.bytes.peak_bytes + beside)}"
    )
    return replace(prediction, generation_bytes=found.bytes.peak_bytes + beside), reason
