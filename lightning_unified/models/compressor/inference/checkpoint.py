"""Load a trained compressor from a file; an untrained one is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_unified.models.choices import inference_device
from lightning_unified.models.compressor.module import Compressor
from lightning_unified.models.plain_checkpoint import load_weights, read_trained

__all__ = ["load", "read"]


def read(path: str | Path) -> dict[str, Any]:
    """Return a compressor's checkpoint as plain data, without running code from the file.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it is damaged, is no checkpoint of a compressor, or was saved before the first step of training.
    """
    return read_trained(path, model="compressor", untrained="its policy would choose by chance")


def load(path: str | Path, *, device: str = "auto") -> Compressor:
    """Return the compressor of a training checkpoint, in eval mode, with its tokenizer.

    The compressor has the sizes of its training, even if its preset has changed since then.

    Args:
        path: The `.ckpt` file.
        device: "cpu", "cuda", "mps" or "auto": the accelerator that is here, else the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: As for `read`; or if weights and sizes do not belong together, or there is no tokenizer.
    """
    saved = read(path)
    sizes = _sizes(saved["compressor"]["config"])
    module = Compressor(**{**saved["hyper_parameters"], **sizes, "load_pretrained": False})
    module.on_load_checkpoint(saved)
    if module.tokenizer is None:
        raise RuntimeError(f"{path} holds no tokenizer; train with a data module that has one, and it travels along.")
    load_weights(module, saved["state_dict"], path=path)
    return module.to(inference_device(device)).eval()


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Compressor` that give these sizes.

    A pretrained reader has its own.
    """
    policy = config["policy"]
    sizes = {"text_length": policy["positions"], "window": policy["window"], "reading": config["reading"]}
    return sizes if config["pretrained"] else {**config["reader"], **sizes}
