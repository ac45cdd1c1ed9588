"""Sources by name, and two corpora: Python's help topics and botocore's documentation.

`pydoc` ships with Python: nothing is downloaded, and the text changes with the Python version. `botocore` (Apache-2.0) is
27 MB of technical English. Both are read at run time and never copied into this package.
"""

import gzip
import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from lightning_unified.data import splitting
from lightning_unified.data.documents.document import Document, installed_files
from lightning_unified.data.sources import builtin, dtc, files

__all__ = ["SOURCES", "botocore", "load", "pydoc"]

_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_TAG = re.compile(r"<[^>]+>")
_LINKING_CHARACTERS = 80  # shorter paragraphs ("Changed in version 3.8: ...") are common phrases and link no topics
_SHORTEST_PASSAGE = 60  # shorter ones are labels ("The Amazon Resource Name.") that hundreds of services share


def load(source: str, *, path: str | None = None, max_groups: int | None = None, seed: int = 0) -> list[Document]:
    """Return the documents of a source.

    Args:
        source: One of `SOURCES`.
        path: A file or folder, for `files` only.
        max_groups: Number of groups (topics, services, files, families of codes) to draw by `seed`; None for all.
        seed: Draws the groups when `max_groups` is given.

    Raises:
        FileNotFoundError: If the package, file or folder is not there.
        ValueError: If a user's file does not have its expected format.
    """
    if source == "files":
        documents = files.read(Path(path or ""))
    elif source == "botocore":
        return botocore(max_groups=max_groups, seed=seed)
    else:
        documents = _READERS[source]()
    if max_groups is None:
        return documents
    documents = splitting.merge_groups(documents)
    kept = set(splitting.ordered_groups({document.group for document in documents}, seed=seed)[:max_groups])
    return [document for document in documents if document.group in kept]


def pydoc() -> list[Document]:
    """Return the topics of `help()`, one document each.

    Topics that share a paragraph are linked.
    """
    return [
        Document(group=name, text=text.strip(), keys=tuple(_long_paragraphs(text)))
        for name, text in sorted(topics.items())
    ]


def botocore(*, max_groups: int | None = None, seed: int = 0) -> list[Document]:
    """Return the documentation of AWS services, one document per service.

    A line holds one passage; no passage appears twice. The newest API version of each service is read. A passage is a string
    under the key `documentation`, without tags and longer than 60 characters.

    Raises:
        FileNotFoundError: If botocore is not installed.
    """
    newest: dict[str, Path] = {}
    for name, path in sorted(installed_files("botocore", source="botocore").items()):
        if match := re.search(r"botocore/data/([^/]+)/[^/]+/service-2\.json\.gz$", name):
            newest[match.group(1)] = path
    services = splitting.ordered_groups(set(newest), seed=seed)[:max_groups]
    seen: set[str] = set()
    documents = []
    for service in sorted(services):
        passages = []
        for passage in _documentation(json.loads(gzip.decompress(newest[service].read_bytes()))):
            if len(passage) > _SHORTEST_PASSAGE and passage not in seen:
                seen.add(passage)
                passages.append(passage)
        if passages:
            documents.append(Document(group=service, text="\n".join(passages)))
    return documents


def _long_paragraphs(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH.split(text):
        words = " ".join(paragraph.split())
        if len(words) >= _LINKING_CHARACTERS:
            yield words


def _documentation(node: Any) -> Iterator[str]:
    """Yield every documentation string below `node`, in file order."""
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            text = node.get("documentation")
            if isinstance(text, str):
                yield " ".join(html.unescape(_TAG.sub(" ", text)).split())
            stack.extend(reversed([value for value in node.values() if isinstance(value, dict | list)]))
        elif isinstance(node, list):
            stack.extend(reversed(node))


_READERS: dict[str, Callable[[], list[Document]]] = {
    "builtin": builtin.documents,
    "dtc": dtc.documents,
    "pydoc": pydoc,
}
SOURCES = (*sorted([*_READERS, "botocore"]), "files")
