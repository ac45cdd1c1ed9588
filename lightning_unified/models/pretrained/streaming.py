"""Load weights one tensor at a time, so that they are never in memory twice.

The model is built without values. Each tensor of a safetensors file then becomes a parameter: a view of the file's pages, which the
system copies when training first writes to them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

__all__ = ["assign", "stored_tensors", "weight_files", "without_values"]


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


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights.

    Raises:
        FileNotFoundError: If there is none. Pickled weights are not supported.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no .safetensors file; pickled weights are not read. Convert them: load the model with transformers "
            "and call save_pretrained."
        )
    return files


def stored_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a safetensors file, each a view of the file's pages."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            yield name, opened.get_tensor(name)


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter `name` by `tensor`, trained or frozen as before."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, own, nn.Parameter(tensor, requires_grad=bool(getattr(module, own).requires_grad)))
