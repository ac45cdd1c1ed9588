"""A batch to plan with: by its shapes, from the data module, or from a user's own function."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.errors import ConfigurationError

__all__ = [
    "batch_of_data", "batch_of_shapes", "batches_of_other_phases", "describe_batch", "largest_batch", "length_of", "rows_of",
    "validation_batch_of_data",
]  # fmt: skip

_SHAPE = re.compile(r"(?:(?P<name>[^=:]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.")
}


def batch_of_shapes(shapes: Sequence[str]) -> Any:
    """Return a batch of zeros: a dict where the shapes have names, else one tensor, or a tuple of several.

    Zeros are valid tokens and classes, and take memory only where something is written to them.

    Args:
        shapes: Each `[name=]SIZES[:DTYPE]`, as in `"input_ids=8x512:int64"`; float32 where no dtype is given.

    Raises:
        ConfigurationError: If one cannot be read, or some have names and others none.
    """
    named: list[tuple[str | None, torch.Tensor]] = [_tensor(text) for text in shapes]
    names = [name for name, _ in named if name is not None]
    if names and len(names) < len(named):
        raise ConfigurationError(
            f"--batch-shape {' '.join(shapes)}: some shapes have names and others none; a dict needs all of them, a tuple none."
        )
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"--batch-shape {' '.join(shapes)}: a name is given twice; each entry of a batch has its own."
        )
    if names:
        return {name: tensor for name, tensor in named if name is not None}
    tensors = tuple(tensor for _, tensor in named)
    return tensors[0] if len(tensors) == 1 else tensors


def _tensor(text: str) -> tuple[str | None, torch.Tensor]:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--batch-shape {text}: this is no shape; write sizes with x between them and the dtype behind a colon, as in "
            "input_ids=8x512:int64 or 8x3x224x224. Overrides stand before this flag."
        )
    dtype = match.group("dtype") or "float32"
    if dtype not in _DTYPES:
        raise ConfigurationError(f"--batch-shape {text}: {dtype} is no dtype of torch{did_you_mean(dtype, _DTYPES)}")
    return match.group("name"), torch.zeros(
        [int(size) for size in match.group("sizes").split("x")], dtype=_DTYPES[dtype]
    )


def batch_of_data(data: LightningDataModule) -> tuple[Any, str]:
    """Return a batch of a data module and what is to be known about it.

    A module that has `example_batch()` is asked for it, and nothing is read, downloaded or encoded. Any other gives the first batch
    of its training loader, for which it prepares itself as for a run.

    Raises:
        ConfigurationError: If it has no training batch.
    """
    example = getattr(data, "example_batch", None)
    if example is not None:
        return example(), "of full size and length by its shapes alone, no data was read"
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()), None)
    if batch is None:
        raise ConfigurationError(f"data: {type(data).__name__} has no training batch to plan with.")
    return batch, "the first of the training data, longer ones take more"


def batches_of_other_phases(data: LightningDataModule) -> dict[str, Any]:
    """Return a whole batch of each phase of a fit but the one that `batch_of_data` gives; none for data of one phase.

    Data whose batches change in the course of a fit has `example_phases()`, which returns them by the phase's name.
    """
    phases = getattr(data, "example_phases", None)
    return {} if phases is None else dict(phases())


def largest_batch(module: LightningModule, batch: Any) -> Any:
    """Return the batch that is cut: the module's own, where `prepare` makes others rows than the loader gave.

    Such a module has `largest_batch(batch)`, which returns the largest that `prepare` can make, and samples nothing.
    """
    made = getattr(module, "largest_batch", None)
    return batch if made is None else made(batch)


def validation_batch_of_data(data: LightningDataModule) -> Any:
    """Return a batch of validation of a data module that `batch_of_data` was asked for before; None where it has none.

    One that has `example_batch()` may have `example_validation_batch()` too, and is asked for nothing else. Of several loaders the
    first is taken.
    """
    if hasattr(data, "example_batch"):
        example = getattr(data, "example_validation_batch", None)
        return None if example is None else example()
    if not is_overridden("val_dataloader", data, LightningDataModule):
        return None
    loaders = data.val_dataloader()
    first = next(iter(loaders), None) if isinstance(loaders, (list, tuple)) else loaders
    return None if first is None else next(iter(first), None)


def rows_of(batch: Any) -> int | None:
    """Return the leading size of the first tensor in `batch`, None if it has none."""
    sizes = [tensor.shape[0] for _, tensor in _tensors(batch) if tensor.ndim]
    return sizes[0] if sizes else None


def length_of(batch: Any) -> int | None:
    """Return the tokens of a row: the second dimension of the first tensor of whole numbers that has one; None without any."""
    whole = [tensor for _, tensor in _tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point()]
    return whole[0].shape[1] if whole else None


def describe_batch(batch: Any) -> str:
    """Return a batch in a line: `"32 rows: input_ids 32×512 int64, labels 32×512 int64"`."""
    entries = [
        f"{name} {'×'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}".strip()
        for name, tensor in _tensors(batch)
    ]
    rows = rows_of(batch)
    head = "" if rows is None else f"{rows} row{'s' * (rows != 1)}: "
    return head + (", ".join(entries) or f"a {type(batch).__name__}")


def _tensors(batch: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        return [(name, batch)]
    if isinstance(batch, Mapping):
        return [entry for key, value in batch.items() for entry in _tensors(value, f"{name}.{key}".lstrip("."))]
    if isinstance(batch, (list, tuple)):
        return [entry for at, value in enumerate(batch) for entry in _tensors(value, f"{name}[{at}]")]
    fields = getattr(batch, "__dict__", {})
    return [(key, value) for key, value in fields.items() if isinstance(value, torch.Tensor)]
