"""Held-out and training texts of an evaluation: the two sides of the training run's split."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_unified.data.documents.document import Document
from lightning_unified.data.sources import corpora, files
from lightning_unified.data.splitting import ordered_groups, split

__all__ = ["by_group", "read", "require_described", "sides"]

_NEEDED = ("source", "val_fraction", "seed")


def sides(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the training and held-out texts of a data module's settings, one text per group.

    Args:
        settings: Arguments of the data module that a model was trained with, as its checkpoint carries them: `source`, `path`,
            `val_fraction`, `seed`, `max_groups`.

    Raises:
        ValueError: If the settings do not define a held-out side.
        FileNotFoundError: If the source is not there.
    """
    require_described(settings)
    documents = corpora.load(
        settings["source"],
        path=settings.get("path"),
        max_groups=settings.get("max_groups"),
        seed=settings["seed"],
    )
    parts = split(documents, fraction=settings["val_fraction"], seed=settings["seed"])
    return by_group(parts.train), by_group(parts.validation)


def require_described(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the settings missing for a held-out side."""
    missing = [name for name in _NEEDED if settings.get(name) is None]
    if missing:
        raise ValueError(
            f"the data is not described: {', '.join(missing)} missing. Name held-out texts and a training corpus yourself, "
            "with --data and --corpus, or as texts and corpus."
        )


def read(name: str) -> list[str]:
    """Read a `.txt` or `.jsonl` file, a folder of them, or a named source; one text per group.

    Raises:
        FileNotFoundError: If there is neither such a file nor such a source.
        ValueError: If a file cannot be read as text.
    """
    if Path(name).exists():
        return by_group(files.read(Path(name)))
    if name not in corpora.SOURCES or name == "files":
        known = ", ".join(source for source in corpora.SOURCES if source != "files")
        raise FileNotFoundError(f"{name} is neither a file, a folder, nor one of the sources {known}.")
    return by_group(corpora.load(name))


def by_group(documents: Sequence[Document]) -> list[str]:
    """Return one text for each group, in an order that depends only on the groups' names.

    Documents of one group are similar, so intervals over single documents would be too narrow.
    """
    texts: dict[str, list[str]] = {}
    for document in documents:
        texts.setdefault(document.group, []).append(document.content)
    return ["\n\n".join(texts[group]) for group in ordered_groups(texts, seed=0)]
