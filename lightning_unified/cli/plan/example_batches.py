"""Example batches for a plan: from shapes, or from the data module."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_unified.cli.config.nearest import did_you_mean
from lightning_unified.errors import ConfigurationError

__all__ = [
    "batch_of_data", "batch_of_shapes", "batches_of_other_phases", "describe_batch", "largest_batch", "length_of", "rank_share", "rows_of",
    "validation_batch_of_data",
]  # fmt: skip

_SHAPE = re.compile(r"(?:(?P<name>[^=:]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name == str(value).removeprefix("torch.")
}


def batch_of_shapes(shapes: Sequence[str]) -> Any:
    """Return a batch of zeros: a dict if the shapes have names, else one tensor or a tuple of several.

    Zeros are valid tokens and classes. The system allocates their pages only when they are written.

    Args:
        shapes: Each `[name=]SIZES[:DTYPE]`, as in `"input_ids=8x512:int64"`; the default dtype is float32.

    Raises:
        ConfigurationError: If a shape cannot be parsed, or only some shapes have names.
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
    """Return a batch of a data module and a note about it.

    A data module with `example_batch()` returns it, and no data is read, downloaded or encoded. Any other data module is prepared as
    for a run and gives the first batch of its training loader.

    Raises:
        ConfigurationError: If it has no training batch.
    """
    example = getattr(data, "example_batch", None)
    if example is not None:
        return example(), "of full size and length, from its shapes alone; no data was read"
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()), None)
    if batch is None:
        raise ConfigurationError(f"data: {type(data).__name__} has no training batch to plan with.")
    return batch, "the first of the training data; longer batches take more"


def batches_of_other_phases(data: LightningDataModule) -> dict[str, Any]:
    """Return a whole batch of every other phase of a fit, by name; empty for data of one phase.

    Data whose batches change their structure during a fit defines `example_phases()`.
    """
    phases = getattr(data, "example_phases", None)
    return {} if phases is None else dict(phases())


def rank_share(batch: Any, ranks: int) -> Any:
    """Return the rows of an example batch that one of several ranks gets.

    The models' data share a batch evenly.

    Args:
        batch: A dict of tensors with the same number of rows.
        ranks: The number of ranks.

    Raises:
        ConfigurationError: If the ranks cannot share the rows evenly.
    """
    rows = rows_of(batch)
    if ranks == 1 or rows is None:
        return batch
    if rows % ranks:
        raise ConfigurationError(
            f"a batch of {rows} rows cannot be shared by {ranks} devices; give a multiple of {ranks} as data.batch_size and "
            "data.val_batch_size: they count the rows over all devices."
        )
    return {name: tensor[: rows // ranks] if tensor.ndim else tensor for name, tensor in batch.items()}


def largest_batch(module: LightningModule, batch: Any) -> Any:
    """Return the batch that is split.

    It is the module's own where its `prepare` makes other rows than the loader.

    Such a module defines `largest_batch(batch)`, which returns the largest batch that `prepare` can make, without sampling.
    """
    made = getattr(module, "largest_batch", None)
    return batch if made is None else made(batch)


def validation_batch_of_data(data: LightningDataModule) -> Any:
    """Return a validation batch of a data module, None if it has none.

    Call it after `batch_of_data`.

    A data module with `example_batch()` gives its `example_validation_batch()`, if defined. With several loaders the first one
    gives the batch.
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
    """Return the tokens of a row, None if there is no integer tensor with two dimensions.

    They are the second dimension of the first such tensor.
    """
    whole = [tensor for _, tensor in _tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point()]
    return whole[0].shape[1] if whole else None


def describe_batch(batch: Any) -> str:
    """Describe a batch in one line: `"32 rows: input_ids 32×512 int64, labels 32×512 int64"`."""
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
