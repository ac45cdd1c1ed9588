"""Load weights tensor by tensor, so that no second copy is in memory or the page cache.

The model is built without values. Each tensor of a safetensors file is then read into memory of its own, which becomes the parameter.
The pages that were read leave the cache at once, see `lightning_unified.files`.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from lightning_unified.files.pages import opened_uncached
from lightning_unified.files.safetensors_file import StoredTensor, read_header, read_tensor

__all__ = ["check_complete", "load_weights", "stored_tensors", "without_values"]


@contextmanager
def without_values() -> Iterator[None]:
    """Create parameters without values; buffers (positions, frequencies) get their values."""
    register = nn.Module.register_parameter

    def register_without_values(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, None if param is None else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = register_without_values  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    names_of: Callable[[str], Collection[str]] = lambda stored: (stored,),
) -> set[str]:
    """Replace a model's parameters by the tensors in a folder; return the missing names.

    Parameters stay trained or frozen. A tensor of another size is skipped.

    Args:
        model: The model, built under `without_values`.
        folder: Holds safetensors; pickled weights are not read.
        dtype: Dtype of the parameters; tensors stored in another one are converted piece by piece.
        names_of: Returns the names of parameters that a stored name may stand for; the first that exists is taken.

    Raises:
        FileNotFoundError: If the folder holds no safetensors.
        ValueError: If a file is damaged.
    """
    wanted = dict(model.named_parameters())
    found: set[str] = set()
    for stored, place, descriptor in stored_tensors(folder):
        name = next((one for one in names_of(stored) if one in wanted), None)
        if name is not None and place.shape == wanted[name].shape:
            path, _, own = name.rpartition(".")
            value = read_tensor(descriptor, place, dtype=dtype)
            setattr(model.get_submodule(path), own, nn.Parameter(value, requires_grad=wanted[name].requires_grad))
            found.add(name)
    return wanted.keys() - found


def stored_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor, int]]:
    """Yield name and place of each tensor of a folder's safetensors, with the open file.

    `read_tensor` reads from that file.

    Raises:
        FileNotFoundError: If the folder holds no safetensors.
        ValueError: If a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no .safetensors file; pickled weights are not read. Convert them: load the model with transformers "
            "and call save_pretrained."
        )
    for file in files:
        header = read_header(file)
        with opened_uncached(file) as descriptor:
            for name, place in header.items():
                yield name, place, descriptor


def check_complete(lacking: Collection[str], *, model: nn.Module, folder: Path) -> None:
    """Raise a RuntimeError if a folder lacks parameters that the model needs."""
    if lacking:
        raise RuntimeError(
            f"the weights in {folder} do not fit its config.json: {len(lacking)} of {len(list(model.parameters()))} parameters are "
            f"missing or of another size, the first is {min(lacking)}. Give a folder whose files belong together."
        )
