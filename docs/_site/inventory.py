"""Write inventories of other projects' documentation from a list of names that is kept by hand."""

import zlib
from collections import defaultdict
from pathlib import Path

__all__ = ["parsed", "written"]


def parsed(text: str) -> dict[str, tuple[str, list[tuple[str, str, str]]]]:
    """Return each project's address and its entries: name, role, place.

    A line `[project] address` begins a project, a line `name role place` is an entry. `$` in a place stands for the name.

    Raises:
        ValueError: If a line has another form.
    """
    projects: dict[str, tuple[str, list[tuple[str, str, str]]]] = {}
    entries: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if line.startswith("[") and len(words) == 2:
            entries = []
            projects[words[0].strip("[]")] = words[1], entries
        elif len(words) == 3 and projects:
            entries.append((words[0], words[1], words[2]))
        else:
            raise ValueError(
                f"line {number} of the inventory: {line!r}; a line is `[project] address` or `name role place`."
            )
    return projects


def written(source: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Write one `objects.inv` per project into `folder`, and return Sphinx's `intersphinx_mapping` of them."""
    mapping = {}
    for project, (address, entries) in parsed(source.read_text(encoding="utf-8")).items():
        places = defaultdict(list)
        for name, role, place in entries:
            places[f"{name} py:{role} 1 {place.replace('$', name)} -"].append(name)
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed with zlib.\n"
        body = "".join(f"{line}\n" for line in places)
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress(body.encode()))
        mapping[project] = (address, str(path))
    return mapping
